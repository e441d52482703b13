"""Rules of the house: which way imports point, what the command line loads, and small habits."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import pathmark
from pathmark.cli.main import COMMANDS, cli

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "pathmark"
FILES = sorted(SOURCE.rglob("*.py"))

FLOORS = [
    {"errors", "progress"},
    {"keys", "stats", "reach"},
    {"results", "verdicts"},
    {"models"},
    {"training"},
    {"embedding", "verification", "attacks", "baselines"},
    {"release"},
    {"evaluate"},
    {"reporting"},
    {"front_door"},
    {"cli"},
]
"""Lowest first. A room imports from floors below its own and from itself, never from its neighbours."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
HEAVY = {"torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors"}
READS_RESULTS_ONLY = {"models", "training", "embedding", "verification", "attacks", "baselines", "release", "evaluate"}


def room_of(file):
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file):
    """Absolute names of everything a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module
            if node.module == "pathmark":  # from pathmark import models
                yield from (f"pathmark.{alias.name}" for alias in node.names)


def rooms_used(file):
    return {name.split(".")[1] for name in imports(file) if name.startswith("pathmark.")}


def forbidden(room, used):
    """Rooms that this room may not use."""
    wrong = {other for other in used - {room} if FLOOR[other] >= FLOOR[room]}
    if room == "reporting":
        wrong |= used & READS_RESULTS_ONLY
    return wrong


def test_imports_point_one_way():
    files = [file for file in FILES if file != SOURCE / "__init__.py"]  # the tour of the API, lazily
    homeless = {room for file in files for room in {room_of(file), *rooms_used(file)}} - FLOOR.keys()
    assert not homeless, f"no floor for {homeless}; add it to FLOORS"
    wrong = {str(f.relative_to(SOURCE)): forbidden(room_of(f), rooms_used(f)) for f in files}
    assert not {file: rooms for file, rooms in wrong.items() if rooms}


def test_the_direction_test_can_fail():
    assert forbidden("verification", {"embedding", "models"}) == {"embedding"}
    assert forbidden("keys", {"models", "stats", "errors"}) == {"models", "stats"}
    assert forbidden("reporting", {"stats", "models"}) == {"models"}
    assert forbidden("attacks", {"training", "models", "embedding"}) == {"embedding"}


def test_keys_stats_results_and_verdicts_know_no_framework():
    files = [file for file in FILES if room_of(file) in ("keys", "stats", "results", "verdicts")]
    known = {f.name: {name.split(".")[0] for name in imports(f)} & HEAVY for f in files}
    assert len(known) > 20
    assert not {file: heavy for file, heavy in known.items() if heavy}


def loaded_after(statement):
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_heavy():
    # in the process of the real entry point, with its exit caught
    loaded = loaded_after(
        "sys.argv = ['pathmark', '--help']\n"
        "from pathmark.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0"
    )
    assert "click" in loaded
    assert not loaded & (HEAVY | {"numpy", "scipy", "rich", "PIL", "cryptography"})


def test_import_of_the_package_is_light_and_its_names_are_there():
    assert not loaded_after("import pathmark; pathmark.__version__; dir(pathmark)") & (HEAVY | {"numpy"})
    for name in pathmark.__all__:
        assert getattr(pathmark, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = pathmark.nonsense


def test_the_installed_script_answers():
    script = Path(sys.executable).with_name("pathmark")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert re.search(rf"^  {name}\s", done.stdout, flags=re.MULTILINE)


def leaves(command, words):
    """(words on the command line, command) of everything that does something."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from leaves(command.get_command(context, name), [*words, name])
    else:
        yield words, command


@pytest.mark.parametrize("words", [words for words, _ in leaves(cli, [])], ids=" ".join)
def test_every_command_has_help_with_examples(words):
    result = CliRunner().invoke(cli, [*words, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"pathmark {' '.join(words)}" in result.output.partition("Examples:")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_described_in_one_sentence(name):
    assert COMMANDS[name][1].endswith(".")
    assert cli.get_command(click.Context(cli), name).help


WRITTEN = [
    file for folder in ("src", "tests", "scripts", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")
]


def functions(file):
    """(name, its lines, parameters but self and cls, the line above it) of every function."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield node.name, node.end_lineno - node.lineno + 1, len(set(names) - {"self", "cls"}), lines[first - 2]


def test_a_file_holds_one_idea():
    lines = {str(f.relative_to(ROOT)): len(f.read_text(encoding="utf-8").splitlines()) for f in WRITTEN}
    assert len(lines) > 200
    assert not {file: count for file, count in lines.items() if count > 400}


def test_functions_are_short_and_take_few_things():
    found = [(f"{f.relative_to(SOURCE)}: {name}", *facts) for f in FILES for name, *facts in functions(f)]
    assert len(found) > 1000
    assert not [name for name, size, _, _ in found if size > 60]
    # more than eight parameters want a config, or their reason in the line above
    assert not [name for name, _, few, above in found if few > 8 and not above.lstrip().startswith("#")]


def test_no_import_goes_in_a_circle():
    names = {"pathmark." + ".".join(f.relative_to(SOURCE).with_suffix("").parts): f for f in FILES}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}
    used = {name: {n for n in at_the_top(file) if n in names and n != name} for name, file in names.items()}
    while free := [name for name, others in used.items() if not others & used.keys()]:
        for name in free:
            del used[name]
    assert not used, f"these import each other: {sorted(used)}"


def at_the_top(file):
    """What a file imports when it is imported itself; submodules by their own name."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nothing_is_left_to_do_in_the_source():
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    assert not [str(f.relative_to(SOURCE)) for f in FILES if unfinished.search(f.read_text(encoding="utf-8"))]


def test_every_direct_dependency_is_pinned():
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'"([\w-]+)>=', project)) - {"setuptools"}
    assert wanted <= pinned, f"add to constraints.txt: {sorted(wanted - pinned)}"
