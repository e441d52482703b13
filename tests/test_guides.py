"""Every shell and Python block of README and of the guides runs, in the order of a newcomer's walk.

What differs from a reader's terminal:

- The guides run one after the other in one temporary folder, as they tell the reader to; README has its own.
- `pathmark` is called in this process, because loading torch for every line would take most of the time.
- Long commands get the flags of QUICK, and `EmbedPlan` its defaults; a check scans a part of the vocabulary. A mark
  that was trained for a few steps is found, and not fit for release.
- Secrets come from a seeded generator, so that what a short training reaches does not depend on luck.

A block that cannot run here has the comment `<!-- not run: reason -->` before it. A `text` block after
`<!-- output -->` is compared with what the block before it printed, up to spaces; `…` stands for anything. A line
that is meant to fail ends with `# exit code 1`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import random
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pathmark.baselines import catalog
from pathmark.cli.main import cli
from pathmark.front_door import embed_plan
from pathmark.release import scan
from pathmark.release.scan import ScanConfig

ROOT = Path(__file__).parent.parent
GUIDES = ["index", "before-release", "publishing", "terminal", "when-you-suspect", "tracing", "choosing"]
"""In this order, in one folder."""
ALONE = ["extending", "planning", "several-watermarks"]
"""In a folder of their own."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICK = {
    "embed": "--steps 24 --n-texts 16 --n-held-out 8 --seq-len 32 --batch-size 6",
    "probes": "--n-texts 8",
    "verify": "--n-texts 12",
    "trace": "--n-texts 12",
    "verify-api": "--trials 2 --max-tokens 12",
}
QUICK_PLAN = {
    "steps": 40, "n_texts": 40, "n_held_out": 20, "seq_len": 32,
    "scan": ScanConfig(random_sequences=5, per_count=2),
}  # fmt: skip
FALLS_SHORT = {"embed", "verify-api"}
"""With QUICK these may say no: a copy is not fit for release, and it was taught no replies."""
NOT_RUN = "not run: "
OUTPUT, NOT_COMPARED = "output", "output, not compared: "


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comment that stands right before it."""

    page: str
    line: int
    language: str
    text: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "sh", "python") and not self.note.startswith("not run")


@dataclass(frozen=True)
class Line:
    """One command of a shell block."""

    words: tuple[str, ...]
    exit_code: int
    into: str | None
    """File that the output goes to."""


def blocks(page: str, text: str) -> list[Block]:
    found, note, start, language, inside = [], "", 0, "", []
    for number, line in enumerate(text.splitlines(), 1):
        if start and line.rstrip() == "```":
            found.append(Block(page, start, language, "\n".join(inside), note))
            note, start, inside = "", 0, []
        elif start:
            inside.append(line)
        elif line.startswith("```"):
            start, language = number, line[3:].strip().split(" ")[0]
        elif comment := re.fullmatch(r"<!-- (.*?) -->", line.strip()):
            note = comment[1]
        elif line.strip():
            note = ""
    assert not start, f"{page}:{start}: the block does not end"
    return found


def lines(text: str) -> Iterator[Line]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        code = re.search(r"# exit code (\d)", line)
        into = None
        if len(words) > 2 and words[-2] == ">":
            *words, _, into = words
        yield Line(tuple(words), int(code[1]) if code else 0, into)


def blocks_of(page: Path) -> list[Block]:
    return blocks(page.name, page.read_text(encoding="utf-8"))


def same(expected: str, printed: str) -> bool:
    parts = [r"\s+".join(map(re.escape, part.split())) for part in expected.split("…")]
    return re.search(r"\s*.*?\s*".join(parts), printed, flags=re.DOTALL) is not None


class Walk:
    """Runs blocks in the present folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.printed = ""

    def page(self, page: Path) -> None:
        names: dict[str, object] = {}
        for block in blocks_of(page):
            if block.runs and block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.text, str(block), "exec"), names)  # noqa: S102  the guides' own code
                self.printed = out.getvalue()
            elif block.runs:
                self.printed = "".join([self.shell(line, block) for line in lines(block.text)])
            elif block.note == OUTPUT:
                assert same(block.text, self.printed), f"{block}: expected\n{block.text}\ngot\n{self.printed}"

    def shell(self, line: Line, block: Block) -> str:
        program, *words = line.words
        if program == "export":
            name, _, value = words[0].partition("=")
            self.monkeypatch.setenv(name, value)
            return ""
        if line.words == ("source", ".venv/bin/activate"):  # the tests run in it
            return ""
        if program == "python":
            command = [sys.executable, *words]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
        assert program == "pathmark", f"{block}: the runner does not know {program!r}"
        return self.pathmark(words, line, block)

    def pathmark(self, words: list[str], line: Line, block: Block) -> str:
        quick = shlex.split(QUICK.get(words[0], ""))
        result = CliRunner().invoke(cli, [*words, *quick])
        told = f"{block}: {shlex.join(line.words)}\n{result.output}{result.exception or ''}"
        assert result.exception is None or isinstance(result.exception, SystemExit), told
        allowed = {0, 1} if words[0] in FALLS_SHORT else {line.exit_code}
        assert result.exit_code in allowed, told
        if line.into:
            Path(line.into).write_text(result.stdout, encoding="utf-8")
            return ""
        return result.stdout


@pytest.fixture
def walk(tmp_path, monkeypatch) -> Walk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "correct horse battery staple")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(secrets, "token_bytes", random.Random(0).randbytes)
    monkeypatch.setattr(embed_plan, "EmbedPlan", functools.partial(embed_plan.EmbedPlan, **QUICK_PLAN))
    monkeypatch.setattr(scan, "WHOLE_VOCABULARY", 200)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return Walk(monkeypatch)


def test_the_guides_run(walk):
    for name in GUIDES:
        walk.page(ROOT / "docs" / f"{name}.md")


@pytest.mark.parametrize("name", ALONE)
def test_pages_that_stand_alone_run(walk, monkeypatch, name):
    monkeypatch.setattr(catalog, "SCHEMES", dict(catalog.SCHEMES))  # what a page registers is gone after it
    walk.page(ROOT / "docs" / f"{name}.md")


def test_the_worked_example_of_a_scheme_is_short():
    example, _ = [block for block in blocks_of(ROOT / "docs" / "extending.md") if block.language == "python"]
    assert "register(" in example.text
    assert len(example.text.splitlines()) < 100


def test_readme_runs(walk):
    walk.page(ROOT / "README.md")
    assert "Found.\nThe owner's mark shows in this model." in walk.printed
    assert "This is the copy of Alpha Ltd" in walk.printed


def test_the_example_in_python_is_ten_lines():
    (example,) = [block for block in blocks_of(ROOT / "README.md") if block.language == "python"]
    assert len([line for line in example.text.splitlines() if line.strip()]) <= 10


def commands_shown() -> list[tuple[str, tuple[str, ...]]]:
    shown = []
    for page in PAGES:
        for block in blocks_of(page):
            if block.language in ("bash", "sh"):
                shown += [(str(block), line.words) for line in lines(block.text) if line.words[0] == "pathmark"]
    return shown


def test_every_command_shown_has_known_options():
    assert not [wrong for place, words in commands_shown() if (wrong := misspelt(place, words))]


def misspelt(place: str, words: tuple[str, ...]) -> str:
    """What the command line would not understand, before it looks at values; empty if nothing."""
    command, context, rest = cli, click.Context(cli), list(words[1:])
    while isinstance(command, click.Group):
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            return f"{place}: no command {name!r} in {shlex.join(words)}"
        command, context = found, click.Context(found, parent=context, info_name=name)
    try:
        _, left, _ = command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return f"{place}: {error.format_message()} in {shlex.join(words)}"
    return f"{place}: {left} belong to nothing in {shlex.join(words)}" if left else ""


def test_misspelt_commands_are_noticed():
    assert not misspelt("here", ("pathmark", "key", "show", "owner.key", "--json"))
    assert "nonsense" in misspelt("here", ("pathmark", "nonsense"))
    assert "--jsn" in misspelt("here", ("pathmark", "key", "show", "owner.key", "--jsn"))
    assert "['more']" in misspelt("here", ("pathmark", "key", "show", "owner.key", "more"))


def test_commands_named_in_sentences_exist():
    context = click.Context(cli)
    for page in PAGES:
        if page.name == "key-format.md":  # its `pathmark leaf 1` and the like are bytes that are hashed
            continue
        for name in re.findall(r"`pathmark ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert cli.get_command(context, name) is not None, f"{page.name}: pathmark {name}"


def test_what_does_not_run_says_why():
    silent = [block for page in PAGES[1:] for block in blocks_of(page) if block.note.startswith("not run")]
    for block in silent:
        assert block.note.startswith(NOT_RUN), str(block)
        assert len(block.note.removeprefix(NOT_RUN).split()) > 1, f"{block}: not run, without a reason"
    assert len(silent) == 29, "blocks that do not run are exceptions: count them here, knowingly"


def test_output_is_compared_or_says_why_not():
    for page in PAGES[1:]:
        for block in blocks_of(page):
            if block.note.startswith("output"):
                assert block.language == "text", str(block)
                assert block.note == OUTPUT or len(block.note.removeprefix(NOT_COMPARED).split()) > 1, str(block)


def test_blocks_outside_the_guides_are_marked():
    for page in PAGES[1:]:
        if page.stem not in (*GUIDES, *ALONE):
            assert not [str(block) for block in blocks_of(page) if block.runs]


def test_every_block_has_a_language():
    assert not [str(block) for page in PAGES[1:] for block in blocks_of(page) if not block.language]


PAGE = """# Title

<!-- not run: no server -->
```bash
pathmark latency URL
```

<!-- not run: too far away -->
Words in between.

```bash
pathmark verify a \\
    --key "my key"   # exit code 1: not marked
# a comment
pathmark key backup k > shares.txt
```

<!-- output -->
```text
made … by
  hand
```
"""


def test_the_parser_of_pages():
    first, second, third = blocks("page", PAGE)
    assert (first.note, first.runs, first.line) == ("not run: no server", False, 4)
    assert (second.note, second.runs) == ("", True)
    assert (third.note, third.language, third.runs) == (OUTPUT, "text", False)
    assert list(lines(second.text)) == [
        Line(("pathmark", "verify", "a", "--key", "my key"), 1, None),
        Line(("pathmark", "key", "backup", "k"), 0, "shares.txt"),
    ]
    with pytest.raises(AssertionError, match="does not end"):
        blocks("page", "```bash\npathmark")


def test_the_comparison_of_outputs():
    assert same("made … by\n  hand", "It was made 2026-11-18 by hand.")
    assert not same("made … by\n  hand", "It was made by machine.")
    assert not same("p = 0.5 (exact)", "p = 0x5 (exact)")


def test_the_walk_notices_failures(walk, tmp_path):
    (tmp_path / "bad.md").write_text("```bash\npathmark nonsense\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"bad\.md:1: pathmark nonsense"):
        walk.page(tmp_path / "bad.md")
    (tmp_path / "wrong.md").write_text(
        "```bash\npathmark --version\n```\n<!-- output -->\n```text\nno version\n```\n", encoding="utf-8"
    )
    with pytest.raises(AssertionError, match=r"wrong\.md:5: expected\s+no version"):
        walk.page(tmp_path / "wrong.md")
