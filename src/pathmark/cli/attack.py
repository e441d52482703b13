"""`pathmark attack`: do to a model what a thief would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from pathmark.attacks import ATTACKS, Attack, find_attack
from pathmark.attacks.attack import Option
from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import (
    Group,
    json_option,
    original_option,
    output_option,
    parallel_option,
    place_options,
    placed,
    plain_option,
    speaks,
    texts_option,
    trust_option,
)
from pathmark.cli._types import KEY, MODEL

SHARED = (
    texts_option("The thief's text"),
    original_option("The unmarked original, or another model of the same shapes, where the attack needs one."),
    click.option(
        "--key", type=KEY, help="Lets the thief know the marked layers and targets, where the attack needs them."
    ),
    plain_option,
    place_options,
    parallel_option,
    trust_option,
    json_option,
)
"""Options of every attack, after its own."""
LIST_EXAMPLES = """\b
Examples:
  pathmark attack list
  pathmark attack list --json
"""


class AttackGroup(Group):
    """A subcommand per attack, whose options are the fields of its config."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """`list`, then the attacks in the order of the catalog."""
        return ["list", *ATTACKS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Build one attack's command; only then is its module imported."""
        if cmd_name in ATTACKS:
            return _command(find_attack(cmd_name))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the catalog, so that --help imports nothing heavy."""
        with formatter.section("Commands"):
            rows = [("list", "Show all attacks with what they need.")]
            formatter.write_dl([*rows, *((a.name, a.summary) for a in ATTACKS.values())])


@click.group(cls=AttackGroup)
def command() -> None:
    """Do to a model what a thief would do, and write the result as a model folder.

    Whatever comes out goes into `pathmark verify`. A whole table at once: `pathmark robustness`.
    """


@command.command("list", epilog=LIST_EXAMPLES)
@json_option
def list_attacks(as_json: bool) -> None:
    """Show all attacks with what their adversary needs."""
    rows = [
        {"name": a.name, "origin": a.origin, "summary": a.summary, "needs": list(a.needs), "inference": a.at_inference}
        for a in ATTACKS.values()
    ]
    if as_json:
        echo_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("attack", "from", "what it does", "needs, besides the weights"):
        table.add_column(heading)
    for a in ATTACKS.values():
        table.add_row(a.name, a.origin, a.summary, ", ".join(a.needs) or "nothing")
    Console(soft_wrap=True).print(table)


def _command(attack: Attack[Any]) -> click.Command:
    settings = attack.options()

    def run(model: str, output: Path, as_json: bool, **given: Any) -> None:
        from pathmark.cli._progress import training_bar
        from pathmark.front_door.attack import AttackConfig
        from pathmark.front_door.attack import attack as carry_out

        shared = {name: given.pop(name) for name in ("texts", "original", "key", "parallel", "trust_remote_code")}
        config = AttackConfig(placement=placed(given), settings=given, **shared)
        with training_bar(quiet=as_json) as bar:
            done = carry_out(attack.name, model, output, config, passphrase=passphrase(), progress=bar)
        if not speaks():
            return
        if as_json:
            echo_json(done.summary())
        else:
            click.echo(f"Written to {output}. Next: pathmark verify {output} --key owner.key")

    for option in reversed(SHARED):
        run = option(run)
    command = click.command(
        attack.name, help=attack.knowledge, short_help=attack.summary, epilog=_examples(attack, settings)
    )(run)
    first = click.command(params=[click.Argument(["model"], type=MODEL)])(
        output_option("The folder to write.")(lambda: None)
    )
    command.params = [*first.params, *map(_click_option, settings), *command.params]
    return command


def _click_option(option: Option) -> click.Option:
    flag = "--" + option.name.replace("_", "-")
    shown: dict[str, Any] = {"default": option.default, "show_default": True, "help": option.help}
    if option.kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], **shown)
    if get_origin(option.kind) is Literal:
        choices = get_args(option.kind)
        kind: Any = click.Choice([str(choice) for choice in choices])
        if all(isinstance(choice, int) for choice in choices):
            return click.Option([flag], type=kind, callback=lambda ctx, param, value: int(value), **shown)
        return click.Option([flag], type=kind, **shown)
    return click.Option([flag], type=option.kind, **shown)


def _examples(attack: Attack[Any], settings: list[Option]) -> str:
    extra = " --original bundled:tiny" if "another model" in attack.needs else ""
    extra += " --key owner.key" if set(attack.needs) & {"marked layers", "target experts"} else ""
    lines = [f"pathmark attack {attack.name} marked -o attacked{extra}"]
    if settings:
        first = settings[0]
        flag = first.name.replace("_", "-")
        shown = f"--{flag}" if first.kind is bool else f"--{flag} {first.default}"
        lines.append(f"pathmark attack {attack.name} marked -o attacked{extra} {shown}")
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
