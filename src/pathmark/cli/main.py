"""`pathmark`: the table of subcommands. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import click

from pathmark.cli._options import Group, processes, speaks
from pathmark.errors import PathmarkError, RanksError, UnforeseenError

COMMANDS: dict[str, tuple[str, str]] = {
    "inspect": (
        "pathmark.cli.inspect",
        "Show a model's routers, its capacity and what PathMark can do with it.",
    ),
    "plan": ("pathmark.cli.plan", "Say what embedding, verifying and attacking a model take, from its config alone."),
    "doctor": ("pathmark.cli.doctor", "Show versions, devices, memory and optional parts, and what to install."),
    "keygen": ("pathmark.cli.keygen", "Make a key for a model."),
    "key": ("pathmark.cli.key", "Show, reveal, back up and restore a key; change its passphrase."),
    "embed": ("pathmark.cli.embed", "Put a key's watermarks into a model and check the result."),
    "apply": ("pathmark.cli.apply", "Rebuild a marked model from its original and a delta."),
    "unpack": ("pathmark.cli.unpack", "Unpack a GGUF file into a folder that verify and trace read."),
    "verify": ("pathmark.cli.verify", "Test whether a key's mark is in a model's weights."),
    "verify-api": ("pathmark.cli.verify_api", "Test whether a key's mark is in what an API replies."),
    "verify-routes": ("pathmark.cli.verify_routes", "Test whether a key's mark is in routes that an engine recorded."),
    "trace": ("pathmark.cli.trace", "Name the licensee whose copy a suspect comes from."),
    "trace-routes": ("pathmark.cli.trace_routes", "Name the licensee whose copy an engine ran, from recorded routes."),
    "evidence": ("pathmark.cli.evidence", "Check evidence that somebody hands you, and measure it again."),
    "probes": ("pathmark.cli.probes", "Write the texts to send to a model that somebody else runs."),
    "commit": ("pathmark.cli.commit", "Publish what a key claims, bind it to a release, check either."),
    "card": ("pathmark.cli.card", "Write a section for a model's card, and a badge, from a published commitment."),
    "issue": ("pathmark.cli.issue", "Allot an id to a licensee."),
    "registry": ("pathmark.cli.registry", "Show who got which id."),
    "latency": ("pathmark.cli.latency", "Time triggered against clean requests at an API."),
    "simulate-latency": ("pathmark.cli.simulate_latency", "Simulate what a mark costs where experts are spread."),
    "attack": ("pathmark.cli.attack", "Do to a model what a thief would do."),
    "robustness": ("pathmark.cli.robustness", "Measure what a suite of attacks leaves of a mark, and what it costs."),
    "reproduce": ("pathmark.cli.reproduce", "Measure the tables and figures of the paper on a model."),
    "testbed": ("pathmark.cli.testbed", "Build a real language model with routers, to try everything on."),
    "report": ("pathmark.cli.report", "Make a page from a result."),
    "demo": ("pathmark.cli.demo", "Do the main job on the bundled model, in about four minutes."),
    "barcode": ("pathmark.cli.barcode", "Draw a key's path as a barcode, or read one from a picture."),
}
"""Name -> (module that holds `command`, line for the overview). Order is the order of --help."""


TOGETHER = {"embed", "verify", "trace", "attack"}
"""Commands that several processes of torchrun do together; each would do any other anew, into the same files."""
_CRASH_FILE: list[Path | None] = []
"""Where the present run is to describe a crash; click hands it over before any command runs."""
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers follows it: "Writing model shards", "Loading weights"
    "HF_HUB_VERBOSITY": "error",  # retries without a network
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",  # its warning about forks
}


class LazyGroup(Group):
    """Imports a subcommand's module only when that subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Overview from the table, so that --help imports nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pathmark", prog_name="pathmark")
@click.option(
    "--crash-file", type=click.Path(path_type=Path), envvar="PATHMARK_CRASH_FILE", expose_value=False,
    is_eager=True, callback=lambda context, option, value: _CRASH_FILE.append(value),
    help="Where to write kind and place of an error that nobody foresaw, without any secret.",
)  # fmt: skip
@click.pass_context
def cli(context: click.Context) -> None:
    """Ownership marks in the routing paths of Mixture-of-Experts language models.

    MODEL, SUSPECT and ORIGINAL are folders, hub ids or bundled:tiny. Exit codes: 0 yes or done, 1 not marked,
    2 could not decide or failed.
    """
    if context.invoked_subcommand not in TOGETHER and processes() > 1:
        raise RanksError(
            f"pathmark {context.invoked_subcommand} is for one process, got {processes()} from torchrun; start it "
            f"without torchrun, which is for {', '.join(sorted(TOGETHER))}"
        )


def main() -> None:
    """Entry point: whatever goes wrong becomes one line and exit code 2, never a traceback and never exit code 1.

    1 says "not marked": a crash or an interrupted run must not be read as an acquittal.
    """
    _quiet_libraries()
    try:
        _run()
    except SystemExit as ended:
        _warn_of_torchrun(ended.code)
        raise


def _run() -> NoReturn:
    try:
        sys.exit(cli.main(prog_name="pathmark", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        _end(_usage(error), 2)
    except (click.Abort, KeyboardInterrupt):
        _end("interrupted; nothing was decided", 130)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # click makes 1 of it, which is our "not marked"
            click.echo("pathmark: nobody read the output to its end; this exit code decides nothing", err=True)
            sys.exit(2)
        raise
    except Exception as error:
        if os.environ.get("PATHMARK_DEBUG"):
            raise
        _write_crash(error)
        _end(_one_line(error), 2)


def _warn_of_torchrun(code: object) -> None:
    """torchrun ends with 1, our "not marked", whatever its processes end with: nobody may take that for a verdict."""
    if code in (0, None) or processes() < 2 or not speaks():
        return
    click.echo(
        f"pathmark: this ended with exit code {code}. torchrun says 1 whatever it was, so its status is no verdict: "
        "read what is printed here, or use --json",
        err=True,
    )


def _end(said: str, code: int) -> NoReturn:
    """One line on stderr, and with --json one object on stdout (error.schema.json)."""
    click.echo(f"pathmark: {said}", err=True)
    if "--json" in sys.argv:
        click.echo(json.dumps({"error": said, "exit": code}))
    sys.exit(code)


def _usage(error: click.ClickException) -> str:
    """What was wrong with the words typed, and where to read how they go."""
    said = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return (
        said
        if context is None
        else f"{said}{'' if said.endswith(('?', ')')) else '.'} Try: {context.command_path} --help"
    )


def _one_line(error: Exception) -> str:
    """What a user can act on; of an error that nobody foresaw only kind and place, since its words may be secret."""
    if isinstance(error, PathmarkError):
        return " ".join(str(error).split())
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"failed unexpectedly ({type(error).__name__} in {Path(place.filename).name}, line {place.lineno}); nothing "
        "was decided. Set PATHMARK_DEBUG=1 to see the whole error, which may show secrets"
    )


def _write_crash(error: Exception) -> None:
    """Kind, places and versions of an error that nobody foresaw: no words and no values, which may be secret."""
    path = next((given for given in reversed(_CRASH_FILE) if given is not None), None)
    if path is None or (isinstance(error, PathmarkError) and not isinstance(error, UnforeseenError)):
        return
    import json
    import platform
    from importlib.metadata import version

    from pathmark.keys.safefile import write_private

    kind, places = type(error).__name__, traceback.extract_tb(error.__traceback__)
    frames = tuple(f"{Path(place.filename).name}:{place.lineno} {place.name}" for place in places)
    if isinstance(error, UnforeseenError):
        kind, frames = error.kind, error.frames
    versions = {name: version(name) for name in ("pathmark", "torch", "transformers")}
    said = {"kind": kind, "frames": frames, "python": platform.python_version(), **versions}
    try:
        write_private(path, (json.dumps(said, indent=2) + "\n").encode())
    except PathmarkError as unwritten:
        click.echo(f"pathmark: no crash file: {_one_line(unwritten)}", err=True)


def _quiet_libraries() -> None:
    """Retries, advice and progress bars of the libraries below are not ours to show; set before they load.

    All by environment variables, which the user's own settings override and which cost no import.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    main()
