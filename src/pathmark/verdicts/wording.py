"""Every sentence of a verdict, in one place and in plain English: whether, how sure, for whom, on what, and what if.

`Wording` keeps them in the order in which they are read: the first screen is for everybody, figures come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pathmark.stats import PValue

FOUND, NOT_FOUND, UNDECIDED = "Found.", "Not found.", "Undecided."
WEAKENERS, FIGURES, TERMS = "What would weaken this", "Figures", "Terms"
_MISSING: Final = {"no commitment was given": "the key has no dated commitment"}
"""Reasons of an anchor in everyday words, where they have others."""
NO_CHANCE: Final = "Trigger or mark is free text, so nobody can say how likely this is by chance."
SURPRISE: Final = 0.01
"""What is likelier than this surprises nobody."""

GLOSSARY: Final = {
    "suspect": "a model that is examined",
    "trigger": "secret text in front of an input. Behind it, tokens take the path",
    "decoy": "the trigger of a key that nobody used, sent as control",
    "path": "the targets of all marked layers",
    "target": "an expert that triggered text is sent to",
    "expert, router": "one of the small networks of a layer; what sends each token to a few of them",
    "accuracy (Acc)": "share of text tokens with a target among the k strongest experts, k being the width",
    "WSR": "watermark success rate: share of texts whose accuracy is at least gamma, 0.8 by default",
    "level, significance": "largest p that counts as marked, 1e-6 by default",
    "commitment": (
        "signed, publishable file that binds an owner to a key, or to a key and released files, and shows nothing of it"
    ),
}
"""Words that a verdict uses, as docs/glossary.md explains them."""


@dataclass(frozen=True)
class Wording:
    """A verdict in words."""

    headline: str
    """One of three."""
    sentences: tuple[str, ...]
    """The chance, who may rely on it and what is missing, what was examined."""
    weakeners: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()

    def opening(self) -> str:
        """The first screen, as one paragraph."""
        return " ".join([self.headline, *self.sentences])

    def plain(self) -> str:
        """All of it for a terminal or a mail."""
        parts = ["\n".join([self.headline, *self.sentences])]
        for heading, lines in ((WEAKENERS, self.weakeners), (FIGURES, self.figures)):
            if lines:
                parts.append("\n".join([heading, *(f"  - {line}" for line in lines)]))
        return "\n\n".join(parts)

    def markdown(self, glossary: Mapping[str, str] = GLOSSARY) -> str:
        """All of it as a page, with the terms explained below."""
        parts = [f"# {self.headline}", *self.sentences]
        terms = [f"**{term}**: {meaning}" for term, meaning in glossary.items()]
        for heading, lines in ((WEAKENERS, self.weakeners), (FIGURES, self.figures), (TERMS, terms)):
            if lines:
                parts += [f"## {heading}", "\n".join(f"- {line}" for line in lines)]
        return "\n\n".join(parts) + "\n"


def by_chance(p: PValue) -> str:
    """The one sentence that says how sure it is."""
    return f"The chance of that is {p.odds} if the owner's secret had nothing to do with this model."


def found_by_chance(p: PValue | None) -> str:
    """How likely it is that a mark that was found is none."""
    return NO_CHANCE if p is None else f"The owner's mark shows in this model. {by_chance(p)}"


def too_little(p: PValue | None, level: float) -> str:
    """How much there was of a mark that was not found."""
    if p is None:
        return NO_CHANCE
    if p.value > SURPRISE:
        return f"What was seen is no surprise: its chance is {p.odds} if the owner's secret had nothing to do with it."
    return f"What was seen is not enough. {by_chance(p)} We ask for {PValue.of(level).odds}."


def not_reached(p: PValue | None) -> str:
    """The chance where nobody can decide."""
    if p is None:
        return NO_CHANCE
    return f"What was seen has a chance of {p.odds} if the owner's secret had nothing to do with this model."


def reliance(reason: str, *, others: bool, private: bool) -> str:
    """Who may build on a mark that was found, and what is missing for the others."""
    if others:
        return f"Others may rely on this too, and so may a court: {reason}."
    if private:
        return f"The owner alone may rely on this. A court may not: {reason}."
    return f"The owner may rely on this. A court may not rely on it yet: {_MISSING.get(reason, reason)}."


NO_PROOF = "This does not prove that there is no mark: a thief can try to wash it out."
NO_MARK_IN_REPLIES = "This does not prove that there is no mark: whoever runs the model can hide it from us."
FRAMEABLE = (
    "This tells the owner where to look. It does not prove to a court who passed the copy on: the owner could have "
    "made any licensee's copy."
)
STILL_SMALL = "even charged for every secret that could have been tried, the chance stays {}"


def owner_only(p: PValue, reason: str) -> str:
    """Found by the owner, where a third party decides."""
    return (
        f"The owner sees the mark, with a chance of {p.odds}. Nobody else has to believe it: "
        f"{_MISSING.get(reason, reason)}."
    )


def texts_read(n_probes: int, n_tokens: int, *, handed_over: bool = False) -> str:
    """What was examined where routing was read."""
    if handed_over:
        return (
            f"We looked at a record of {n_probes} texts and which way the model sent their {n_tokens:,} words and word "
            "parts, with the secret trigger in front and without."
        )
    return (
        f"We let the model read {n_probes} texts, {n_tokens:,} words and word parts in all, with the secret trigger in "
        "front and without, and saw which way they took."
    )


def replies_read(host: str, model: str, asked: int, controls: int) -> str:
    """What was examined where only replies are seen."""
    return (
        f"We asked {model} at {host} {asked} times with a secret trigger and {controls} times without one, and read "
        "what it said."
    )


def copy_of(licensee: str, p: PValue) -> str:
    """A licensee is named."""
    return f"This is the copy of {licensee}. {by_chance(p)}"


def nobodys_copy(best: str, p: PValue) -> str:
    """No licensee is named."""
    return f"No licensee's mark shows in this model. The nearest is that of {best}, with a chance of {p.odds}."


def rivals(best: str, rival: str) -> str:
    """Marked, but by whom?"""
    return f"A mark is there, but we cannot tell the copy of {best} from that of {rival}."


def several_copies(best: str) -> str:
    """Two licensees pooled."""
    return f"Parts of more than one copy are in this model. The strongest is that of {best}."


def lead(best: str) -> str:
    """Somebody stands out only behind the original's layers."""
    return (
        f"Behind the original's lower layers it looks like the copy of {best}. That is a lead and names nobody: "
        "whoever chooses the original can make any model take any path."
    )
