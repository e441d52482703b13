"""Verdicts in words: three headlines, the chance as `1 in so many`, and sentences that a newspaper could print."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import fake_api as fake
import pytest
import textstat
from blackbox_helpers import owner, verdict_of
from verify_helpers import dated

from pathmark.models import load_model
from pathmark.stats import Family, PValue, TraceResult
from pathmark.verdicts.wording import GLOSSARY, Wording
from pathmark.verification import Anchor, TracedCopy, judge, profile_texts, record_evidence
from pathmark.verification.paths.judging import PathVerdict

GLOSSARY_PAGE = Path(__file__).parent.parent.parent / "docs" / "glossary.md"
NEWSPAPER = 50
"""Flesch reading ease: 60 to 70 is plain English, newspapers lie between 50 and 70, contracts below 30."""


@pytest.fixture(scope="module")
def found(case) -> PathVerdict:
    return judge(case.key, record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:4]))


def with_anchor(verdict, anchor, **criteria):
    return replace(verdict, criteria=replace(verdict.criteria, anchor=anchor, **criteria))


def traced(decision, rival=None):
    result = TraceResult(decision, "Alpha Ltd", PValue(-9.2), rival, None, None, None, (), Family(ids=4))
    behind = None
    if decision == "lead":
        result, behind = replace(result, decision="none"), replace(result, decision="licensee")
    return TracedCopy(result, {"Alpha Ltd": 7, "Beta & Co": 9}, 100, 12_800, behind).wording()


@pytest.mark.parametrize(
    ("log10", "said"),
    [
        (0.0, "more than 1 in 2"),
        (-0.31, "1 in 2"),
        (-1.0, "1 in 10"),
        (-3.0, "1 in 1,000"),
        (-4.69, "1 in 48,000"),  # 48,978 rounded down: a chance is never told smaller than it is
        (-6.0, "1 in 1 million"),
        (-9.92, "1 in 8.3 billion"),
        (-12.205, "1 in 1.6 trillion"),
        (-17.5, "1 in 310 quadrillion"),
        (-63.4, "1 in a number of 64 digits"),
        (-742.3, "1 in a number of 743 digits"),
    ],
)
def test_odds(log10, said):
    assert PValue(log10).odds == said


def test_odds_never_promise_more_than_p():
    names = {"million": 1e6, "billion": 1e9, "trillion": 1e12, "quadrillion": 1e15}
    for step in range(31, 1790):
        p = PValue(-step / 100)
        count, _, name = p.odds.removeprefix("1 in ").partition(" ")
        promised = float(count.replace(",", "")) * names.get(name, 1)
        assert promised * p.value <= 1 + 1e-6
        assert promised * p.value > 0.9


def test_the_first_screen_is_for_everybody(found):
    said = found.wording()
    assert said.headline == "Found."
    chance, relies, examined = said.sentences
    assert re.fullmatch(
        r".* The chance of that is 1 in [\d.,]+ \w+ if the owner's secret had nothing to do with this model\.", chance
    )
    assert relies.endswith("A court may not rely on it yet: the key has no dated commitment.")
    assert "4 texts, 128 words and word parts" in examined
    first_screen = said.opening()
    for jargon in ("bits", "charged", "p =", "WSR", "level", "anchor"):
        assert jargon not in first_screen
    below = found.words().removeprefix("\n".join([said.headline, *said.sentences]))
    assert below.index("What would weaken this") < below.index("Figures") < below.index("charged")
    assert found.summary()["words"] == first_screen


def test_who_may_rely_on_it(case, found):
    assert "so may a court: dated." in with_anchor(found, dated(case.key)).words()
    withheld = dated(case.key).withheld("whoever claims the mark could have chosen it")
    assert "The owner alone may rely on this. A court may not: whoever" in with_anchor(found, withheld).words()
    small = with_anchor(found, Anchor(False, "no commitment was given", 1))
    assert "even charged for every secret that could have been tried, the chance stays 1 in " in small.words()
    strict = with_anchor(found, withheld, strict=True)
    assert strict.decision == "not marked"
    assert strict.words().startswith("Not found.\nThe owner sees the mark, with a chance of 1 in ")
    grafted = replace(with_anchor(found, dated(case.key)), grafted=True, other=replace(found, p=PValue(-0.2)))
    assert "A court may not rely on it yet: it shows only behind the original's lower layers" in grafted.words()


def test_what_is_not_found_is_not_acquitted(found):
    seen = replace(found, p=PValue(-0.4)).wording()
    assert seen.headline == "Not found."
    assert seen.sentences[0].startswith("What was seen is no surprise: its chance is 1 in 2.5 if")
    assert "does not prove that there is no mark" in seen.sentences[1]
    assert not [line for line in seen.weakeners if "proven date" in line]
    little = replace(found, p=PValue(-3.5)).wording().sentences[0]
    assert little.startswith("What was seen is not enough. The chance of that is 1 in 3,100 if")
    assert little.endswith("We ask for 1 in 1 million.")


def test_free_text_has_no_chance(found):
    silent = verdict_of(fake.marked(owner()))
    assert "nobody can say how likely" in replace(silent, p=None, p_floor=None, undecided="free text").words()


@pytest.mark.parametrize(
    ("decision", "rival", "headline", "sentence"),
    [
        ("licensee", "Beta & Co", "Found.", "This is the copy of Alpha Ltd (id 7). The chance of that is 1 in 1.5"),
        ("several", "Beta & Co", "Found.", "Parts of more than one copy are in this model. The strongest is that of"),
        ("none", None, "Not found.", "No licensee's mark shows in this model. The nearest is that of Alpha Ltd (id 7)"),
        ("lead", None, "Undecided.", "it looks like the copy of Alpha Ltd (id 7). That is a lead and names nobody"),
        ("ambiguous", "Beta & Co", "Undecided.", "cannot tell the copy of Alpha Ltd (id 7) from that of Beta & Co"),
    ],
)  # fmt: skip
def test_traces_have_the_same_headlines(decision, rival, headline, sentence):
    said = traced(decision, rival)
    assert said.headline == headline
    assert sentence in said.opening()


def sentences_of(*said: Wording) -> list[str]:
    """Whole sentences, each once."""
    found = [part for words in said for line in words.sentences for part in re.split(r"(?<=[a-z)])\. ", line)]
    return list(dict.fromkeys(part.rstrip(".") + "." for part in found))


def test_sentences_read_like_a_newspaper(case, found):
    undecided = replace(found, undecided="only 3 of 40 trials were answered")
    read = sentences_of(
        found.wording(), with_anchor(found, dated(case.key)).wording(), replace(found, p=PValue(-0.4)).wording(),
        undecided.wording(), verdict_of(fake.marked(owner())).wording(), replace(found, handed_over=True).wording(),
        *(traced(decision, "Beta & Co") for decision in ("licensee", "several", "none", "lead", "ambiguous")),
    )  # fmt: skip
    assert len(read) >= 10
    scores = {sentence: textstat.flesch_reading_ease(sentence) for sentence in read}
    assert not {sentence: score for sentence, score in scores.items() if score < NEWSPAPER}
    assert textstat.flesch_reading_ease(" ".join(read)) >= 65


def test_the_measure_of_reading_ease_can_fail():
    legalese = (
        "Notwithstanding the aforementioned probabilistic characterisation, evidentiary admissibility presupposes "
        "contemporaneous cryptographic authentication."
    )
    assert textstat.flesch_reading_ease(legalese) < 30


def test_terms_are_those_of_the_glossary(found):
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|$", GLOSSARY_PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {term: rows.get(term) for term in GLOSSARY} == GLOSSARY
    page = found.wording().markdown()
    assert page.startswith("# Found.\n\nThe owner's mark shows in this model. ")
    assert "- **trigger**: secret text in front of an input" in page
    assert page.index("## What would weaken this") < page.index("## Figures") < page.index("## Terms")
