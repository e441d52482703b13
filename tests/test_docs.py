"""Generated pages are current (run `make docs` when they are not), pages are short, links and nav are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pathmark.baselines import SCHEMES
from pathmark.errors import KeyFileError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import cli_doc  # noqa: E402
import models_doc  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks"))
import schemes  # noqa: E402

NAMED = "mixtral qwen2_moe qwen3_moe phimoe olmoe deepseek_v2 deepseek_v3 gpt_oss granitemoe glm4_moe ernie4_5_moe"
GUIDES = sorted(path.relative_to(ROOT) for path in ROOT.glob("docs/**/*.md"))
PAGES = sorted([*(path.relative_to(ROOT) for path in ROOT.glob("*.md")), *GUIDES])


def test_the_table_of_models_is_current():
    text = models_doc.PAGE.read_text(encoding="utf-8")
    assert models_doc.page(text) == text


def test_at_least_50_types_work_and_the_named_ones_among_them():
    text = models_doc.PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\|.*?\| (.*?) \|", text, flags=re.MULTILINE))
    assert sum(support == "yes" for support in rows.values()) >= 50
    assert {rows[name] for name in NAMED.split()} == {"yes"}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_other_pages_tell_the_same_number(page):
    works, total = re.search(r"^(\d+) of (\d+) types work", models_doc.PAGE.read_text(), flags=re.MULTILINE).groups()
    assert f"{works} of the {total} MoE causal-LM types" in (ROOT / page).read_text(encoding="utf-8")


def test_the_tables_of_other_schemes_are_current():
    rows = schemes.read_result(schemes.RESULT, schemes.SchemesResult, schemes.FORMAT, schemes.VERSION).rows
    assert {row.scheme for row in rows if not row.settings} == set(SCHEMES)
    text = schemes.PAGE.read_text(encoding="utf-8")
    assert schemes.page(text, rows) == text
    assert schemes.page(text, rows[:1]) != text


def test_the_command_line_reference_is_current():
    # in a process of its own: click keeps the help option of a command that another test has called alone
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import cli_doc; print(cli_doc.page(), end='')"
    rendered = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert cli_doc.PAGE.read_text(encoding="utf-8") == rendered


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            if "://" not in target:
                there = (ROOT / page).parent / target if target else ROOT / page
                assert there.exists(), f"{page}: {target}"
                assert not anchor or anchor in anchors(there), f"{page}: {target}#{anchor}"


def anchors(page):
    """What a heading is called in a link, on the site and on code hosts alike."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_are_short():
    lines = {page.name: len((ROOT / page).read_text(encoding="utf-8").splitlines()) for page in GUIDES}
    assert not {name: count for name, count in lines.items() if count >= 250 and name != "cli.md"}


def test_every_page_has_its_place_in_the_nav():
    named = re.findall(r"\b([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in GUIDES)


def test_the_site_needs_nothing_outside_its_folder():
    for page in GUIDES:
        assert "](../" not in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_action_on_the_page_is_the_example_and_its_command_exists():
    action = (ROOT / "examples" / "check-release.yml").read_text(encoding="utf-8")
    assert f"```yaml\n{action}```" in (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")
    steps = yaml.safe_load(action)["jobs"]["check"]["steps"]
    (words,) = [step["run"].split()[1:] for step in steps if step.get("run", "").startswith("pathmark ")]
    with pytest.raises(KeyFileError, match="cannot read commitments/release"):  # every option is known
        cli_doc.cli.main(words, standalone_mode=False)
