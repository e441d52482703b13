"""`pathmark attack`: do to a model what a thief would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from pathmark.attacks.catalog import ATTACKS, Attack, Option, find_attack
from pathmark.cli._keys import echo_json, json_option

LIST_EXAMPLES = """\b
Examples:
  pathmark attack list
  pathmark attack list --json
"""


class AttackGroup(click.Group):
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
            rows = [("list", "All attacks with what they need.")]
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


def _command(attack: Attack) -> click.Command:
    settings = attack.options()
    params: list[click.Parameter] = [
        click.Argument(["model"]),
        click.Option(["-o", "--output"], required=True, type=click.Path(path_type=Path), help="Folder to write."),
        *map(_click_option, settings),
        click.Option(["--corpus"], type=click.Path(path_type=Path), help="The thief's text. Default: bundled."),
        click.Option(["--base"], help="Another model of the same shapes, where the attack needs one."),
        click.Option(
            ["--key", "key_file"], type=click.Path(path_type=Path),
            help="Lets the thief know the marked layers and targets, where the attack needs them.",
        ),
        click.Option(["--trust-remote-code"], is_flag=True, help="Run the model folder's own Python code."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ]  # fmt: skip

    def run(model: str, output: Path, as_json: bool, **given: Any) -> None:
        shared = {name: given.pop(name) for name in ("corpus", "base", "key_file", "trust_remote_code")}
        _attack(attack, model, output, as_json, given, **shared)

    return click.Command(
        attack.name,
        callback=run,
        params=params,
        help=attack.knowledge,
        short_help=attack.summary,
        epilog=_examples(attack, settings),
    )


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


def _examples(attack: Attack, settings: list[Option]) -> str:
    extra = " --base bundled:tiny" if "another model" in attack.needs else ""
    extra += " --key owner.key" if set(attack.needs) & {"marked layers", "target experts"} else ""
    lines = [f"pathmark attack {attack.name} marked -o attacked{extra}"]
    if settings:
        first = settings[0]
        flag = first.name.replace("_", "-")
        shown = f"--{flag}" if first.kind is bool else f"--{flag} {first.default}"
        lines.append(f"pathmark attack {attack.name} marked -o attacked{extra} {shown}")
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _attack(
    attack: Attack,
    name: str,
    output: Path,
    as_json: bool,
    given: dict[str, Any],
    *,
    corpus: Path | None,
    base: str | None,
    key_file: Path | None,
    trust_remote_code: bool,
) -> None:
    from pathmark.attacks.kit import Kit
    from pathmark.cli._keys import open_key
    from pathmark.cli._progress import Bar
    from pathmark.errors import AttackError
    from pathmark.models import bundled_segments, load_model, load_tokenizer
    from pathmark.models.checkpoint import write_model
    from pathmark.models.loading import use_fast_experts
    from pathmark.models.texts import read_texts
    from pathmark.training import keep_freed_memory

    keep_freed_memory()
    if attack.at_inference:
        raise AttackError(
            f"{attack.name} acts while the model runs and leaves no weights to write; `pathmark robustness` measures it"
        )
    if output.exists():
        raise AttackError(f"{output} already exists; choose another name, nothing is overwritten")
    config = attack.configure(**given)
    key = None if key_file is None else open_key(key_file)
    marks = () if key is None else key.watermarks
    with Bar(quiet=as_json) as bar:
        bar.stage("loading", None)
        model = load_model(name, trust_remote_code=trust_remote_code)
        use_fast_experts(model)
        kit = Kit(
            tokenizer=load_tokenizer(name, trust_remote_code=trust_remote_code),
            texts=read_texts(corpus) if corpus is not None else bundled_segments(),
            base=None if base is None else load_model(base, trust_remote_code=trust_remote_code),
            layers=sorted({layer for mark in marks for layer in mark.layers}),
            targets={layer: mark.targets(layer) for mark in marks[:1] for layer in mark.layers},
            progress=bar,
        )
        attacked = attack.run(model, config, kit)
        bar.stage("writing", None)
        write_model(attacked, kit.tokenizer, output)
    if as_json:
        echo_json({"attack": attack.name, "settings": given, "output": str(output)})
    else:
        click.echo(f"Written to {output}. Next: pathmark verify {output} --key owner.key")
