"""Options that several commands share, each declared once, and a group that knows what was meant."""

from __future__ import annotations

import datetime
import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._types import COMMITMENT, KEY, MODEL, NEW, REGISTRY, ROOTS, SHARE, TEXTS
from pathmark.errors import VerificationError

if TYPE_CHECKING:
    from pathmark.models.devices import Placement
    from pathmark.verification import Criteria

EXPECTS_PLAIN = "pathmark.expects_plain"
"""Under this name a command's context remembers --plain."""
Decorator = Callable[[Any], Any]
PATH = click.Path(path_type=Path)

_QUIET = "pathmark.quiet"


def _hush(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.meta[_QUIET] = value


def is_quiet() -> bool:
    """Whether the command that runs was asked to print its result alone."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


registry_option = click.option("--registry", required=True, type=REGISTRY, help="The database of who got which id.")
base_option = click.option(
    "--base", type=MODEL, help="The base model of a peft adapter; what its config names is the suspect's choice."
)
trust_option = click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python code.")
_place_options = [
    click.option(
        "--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]|mps",
        help="Where the model runs; auto takes the first accelerator, and spreads over several what one cannot hold.",
    ),
    click.option(
        "--dtype", type=click.Choice(["auto", "bf16", "fp32"]), default="auto", show_default=True,
        help="The type of weights that are not trained; auto keeps bf16 on accelerators. Routers are in 32 bits.",
    ),
]  # fmt: skip
sandbox_option = click.option(
    "--no-sandbox", is_flag=True, envvar="PATHMARK_NO_SANDBOX",
    help="Read the suspect in this process, not in one without network and with bounded memory and patience.",
)  # fmt: skip
significance_option = click.option(
    "--significance", type=SHARE, default=1e-6, show_default=True, help="The family-wise level of the test."
)
suspects_option = click.option(
    "--suspects", type=click.IntRange(1), default=1, show_default=True, help="How many models this case examines."
)
tokens_option = click.option(
    "--tokens", type=click.IntRange(4), default=128, show_default=True, help="How many tokens of each text are used."
)
stream_option = click.option(
    "--stream", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
    help="Read the weights layer by layer; auto does so when they need more than half of the free memory.",
)  # fmt: skip
tokenizer_option = click.option(
    "--tokenizer", default="bundled:tiny", show_default=True,
    help="The model whose tokenizer the key was made for; no weights are read.",
)  # fmt: skip
no_align_option = click.option("--no-align", is_flag=True, help="Take experts by their numbers, without matching.")
api_key_option = click.option("--api-key-env", help="The environment variable that holds the API key.")
endpoint_option = click.option(
    "--endpoint", type=click.Choice(["auto", "chat", "completions"]), default="auto", show_default=True,
    help="Which endpoint is asked.",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of everything that is drawn."
)


def placed(options: dict[str, Any]) -> Placement:
    """Where to run, taken out of a command's options."""
    from pathmark.models.devices import Placement

    return Placement(device=options.pop("device"), dtype=options.pop("dtype"))


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which help shows them."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


json_option = together(
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object, also for an error."),
    click.option(
        "--quiet", is_flag=True, expose_value=False, is_eager=True, callback=_hush, help="Print the result alone."
    ),
)


def _expect_plain(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.meta[EXPECTS_PLAIN] = value


plain_option = click.option(
    "--plain", is_flag=True, expose_value=False, callback=_expect_plain,
    help="The key is stored without encryption, although there is a passphrase.",
)  # fmt: skip
key_argument = together(click.argument("key_file", metavar="KEY", type=KEY), plain_option)


def key_option(help_text: str = "The key made by keygen.", *, required: bool = True) -> Decorator:
    """`--key`, where a key is needed."""
    return together(click.option("--key", "key_file", required=required, type=KEY, help=help_text), plain_option)


def output_option(help_text: str, *, new: bool = True) -> Decorator:
    """`-o`, where something is written; nothing is overwritten."""
    return click.option("-o", "--output", required=True, type=NEW if new else PATH, help=help_text)


def original_option(help_text: str) -> Decorator:
    """`--original`, the unmarked model."""
    return click.option("--original", type=MODEL, help=help_text)


def texts_option(what: str, default: str = "the bundled ones") -> Decorator:
    """`--texts FILE`."""
    return click.option(
        "--texts", type=TEXTS, metavar="FILE", help=f"{what}, from a .txt, a .jsonl or a folder. Default: {default}."
    )


def n_texts_option(
    help_text: str = "How many texts are used.", *, least: int = 1, default: int | None = 100
) -> Decorator:
    """`--n-texts`."""
    shown = default is not None
    return click.option("--n-texts", type=click.IntRange(least), default=default, show_default=shown, help=help_text)


place_options = together(*_place_options)
"""Where a model runs."""
parallel_option = click.option(
    "--parallel", type=click.Choice(["none", "ddp", "fsdp"]), default="none", show_default=True,
    help="How processes started by torchrun train together: each with the whole model, or with shards of its layers.",
)  # fmt: skip


def speaks() -> bool:
    """Whether this process prints what came out; of those that torchrun started, the first."""
    return int(os.environ.get("RANK", "0")) == 0


def processes() -> int:
    """How many processes torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


look_options = together(
    base_option, texts_option("The probe texts", "those in the key"), n_texts_option("How many probe texts are used."),
    tokens_option, stream_option, *_place_options, trust_option, sandbox_option,
)  # fmt: skip
"""How a suspect's weights are looked at."""


def _day(context: click.Context, option: click.Parameter, value: datetime.datetime | None) -> datetime.date | None:
    if value is not None and value.date() > datetime.datetime.now(datetime.UTC).date():
        raise VerificationError(f"the suspect cannot have been published on {value.date()}, which is yet to come")
    return None if value is None else value.date()


_judge_options = together(
    click.option(
        "--commitment", type=COMMITMENT, multiple=True,
        help="The published commitment of the key. Further ones of the same signer (repeatable) count as tried.",
    ),
    click.option(
        "--suspect-published", "published", type=click.DateTime(["%Y-%m-%d"]), callback=_day,
        help="The day on which the suspect, or its first ancestor, was published.",
    ),
    click.option(
        "--timestamp-roots", type=ROOTS,
        help="Root certificates (PEM) of the time-stamping authorities that you trust with the commitment's date.",
    ),
    click.option(
        "--block-headers", type=PATH,
        help="Headers of the Bitcoin blocks (160 hex digits per line) that OpenTimestamps proofs lead to.",
    ),
    click.option("--strict", is_flag=True, help="Let the third party's p-value decide, not the owner's."),
    significance_option,
    suspects_option,
    click.option(
        "--keys", type=click.IntRange(1), default=1, show_default=True, help="How many keys this suspect is tried with."
    ),
)  # fmt: skip


def judge_options(*, gamma: bool = True) -> Decorator:
    """By what a verdict is reached; replies have no gamma."""
    added = click.option(
        "--gamma", type=SHARE, default=0.8, show_default=True, help="The threshold of the paper's WSR."
    )
    return together(_judge_options, added) if gamma else _judge_options


def judged_by(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a JudgeConfig from these options."""
    from pathmark.stats import Family
    from pathmark.verification import Criteria

    measures = {name: options[name] for name in ("gamma", "significance", "strict") if name in options}
    criteria: Criteria = Criteria(**measures, family=Family(suspects=options["suspects"], keys=options["keys"]))
    given = {name: options[name] for name in ("published", "timestamp_roots", "block_headers")}
    first, *others = options["commitment"] or [None]
    return {"criteria": criteria, "commitment": first, "others": tuple(others), **given}


def _must_be_new(context: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.exists():
        raise VerificationError(f"{value} already exists; choose another --log, nothing is overwritten")
    return value


def _asked(context: click.Context, option: click.Parameter, value: str | None) -> str:
    """Only for a log, and before the work; what was not given is asked for after all that was."""
    if value is not None or context.params.get("log_folder") is None or not sys.stdin.isatty():
        return value or "not stated"
    answer: str = click.prompt("How was the suspect obtained (for the log)", default="not stated", err=True)
    return answer


log_options = together(
    click.option(
        "--log", "log_folder", type=PATH, callback=_must_be_new, help="Keep raw results and digests in this new folder."
    ),
    click.option(
        "--obtained", callback=_asked, help="How the suspect was obtained, for the log. It is asked for in a terminal."
    ),
)  # fmt: skip


def _new_bundle(context: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and os.path.lexists(value):
        raise VerificationError(f"{value} already exists; choose another --evidence, nothing is overwritten")
    return value


def _custody(context: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """Read before the work, so that a mistake in it costs nothing."""
    if value is not None:
        from pathmark.front_door.custody import read_custody

        read_custody(value)
    return value


evidence_options = together(
    click.option(
        "--evidence", type=PATH, callback=_new_bundle,
        help="Also write a signed evidence bundle for others: a new folder, or a zip if the name ends so.",
    ),
    click.option(
        "--reveal", type=click.IntRange(0), multiple=True, default=(0,), show_default=True,
        help="With --evidence: which watermark the bundle opens (repeatable). Others stay secret.",
    ),
    click.option("--reveal-nothing", is_flag=True, help="With --evidence: open no watermark; nobody can replay it."),
    click.option(
        "--custody", type=PATH, callback=_custody,
        help="With --evidence: a TOML file that says who had the suspect since when.",
    ),
    click.option("--zip", "zipped", is_flag=True, help="With --evidence: write one zip."),
)  # fmt: skip
"""A bundle for somebody without the key."""


commitment_for_evidence = click.option(
    "--commitment", type=PATH, help="With --evidence: the published commitment of the key."
)


def write_evidence(found: Any, options: dict[str, Any]) -> None:
    """After the verdict was shown: write the bundle that was asked for and say what it gives away."""
    if options.get("evidence") is None:
        return
    from pathmark.front_door.bundle import EvidenceConfig

    reveal = () if options["reveal_nothing"] else tuple(options["reveal"])
    config = EvidenceConfig(
        reveal=reveal, custody=options["custody"], obtained=options.get("obtained") or "not stated",
        command=("pathmark", *sys.argv[1:]), zip=options["zipped"],
    )  # fmt: skip
    place = found.write_evidence(options["evidence"], config)
    opened = ", ".join(map(str, reveal))
    told = f"it opens watermark {opened}: hand it only to those who judge" if reveal else "it opens no watermark"
    click.echo(f"Evidence in {place}; {told}.", err=True)


def require_somebody(suspect: str, log: Path | None) -> None:
    """An address at which nobody listens is told before anything heavy is loaded; a complete log needs nobody."""
    if suspect.startswith(("http://", "https://")) and (log is None or not log.exists()):
        from pathmark.reach import require_reachable

        require_reachable(suspect)


class Group(click.Group):
    """A group that says which command was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, but with a suggestion."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"there is no command {name!r}{meant}")
        return super().resolve_command(ctx, args)
