"""`pathmark verify`: is a key's mark in these weights?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import passphrase
from pathmark.cli._options import (
    PATH,
    evidence_options,
    json_option,
    judge_options,
    judged_by,
    key_option,
    log_options,
    look_options,
    no_align_option,
    original_option,
    placed,
    speaks,
)
from pathmark.cli._schemes import scheme_option
from pathmark.cli._schemes import verify as verify_with_scheme
from pathmark.cli._types import MODEL

if TYPE_CHECKING:
    from pathmark.keys import ClaimedKey
    from pathmark.verification import ExamineConfig

EXAMPLES = """\b
Examples:
  pathmark verify ./suspect --key owner.key
  pathmark verify ./suspect --key owner.key --commitment owner.commitment.json --suspect-published 2026-09-01 \\
    --timestamp-roots authority.pem --strict
  pathmark verify ./suspect --key owner.key --commitment owner.commitment.json --evidence case-17
  pathmark verify ./adapter --base ./Qwen1.5-MoE-A2.7B --key owner.key --log case-17
  pathmark verify ./pruned-copy --key owner.key --original ./our-unmarked-original
  pathmark verify ./suspect --claim claim.json --commitment owner.commitment.json --suspect-published 2026-09-01 \\
    --timestamp-roots authority.pem
  pathmark verify ./DeepSeek-V3-clone --key owner.key --stream always --n-texts 20 --json
  pathmark verify ./suspect --scheme learnmark --key learnmark.key
"""


@click.command(epilog=EXAMPLES)
@click.argument("suspect", type=MODEL)
@key_option(required=False)
@click.option(
    "--claim",
    type=PATH,
    help="In the place of --key: a claim (`key reveal`) that opens one watermark of the --commitment.",
)
@scheme_option
@original_option("The unmarked original: the suspect's marked layers are also read behind its lower layers.")
@look_options
@click.option("--decoys", type=click.IntRange(0, 64), default=3, show_default=True, help="How many control triggers.")
@click.option(
    "--reference",
    type=MODEL,
    help="The owner's release or original; experts are matched to it, not to the key's profiles.",
)  # fmt: skip
@no_align_option
@judge_options()
@log_options
@evidence_options
@json_option
def command(suspect: str, key_file: Path | None, claim: Path | None, as_json: bool, **options: Any) -> None:
    """Test whether a key's mark is in a model, from its weights.

    Experts are matched to the original's first, blind to the secret; then an exact test compares what the trigger
    does to the secret path with what it does to every other path. A suspect that was damaged (pruned, squeezed,
    fine-tuned) may have lost the trigger on its way up: --original also reads its marked layers behind the original's
    lower ones. An arbiter needs no key: --claim with its --commitment gives the third party's verdict, on texts of the
    arbiter's (--texts), those that were committed, or public ones. Exit code 0: marked, 1: not marked, 2: cannot decide
    or failed.
    """
    if options["scheme"] is not None:
        verify_with_scheme(suspect, key_file, options, as_json)
    from pathmark.cli._progress import Bar
    from pathmark.cli._verdict import finish
    from pathmark.front_door.verify import VerifyConfig, verify

    looked = {name: options[name] for name in ("original", "base", "texts", "reference")}
    examine = examine_config(options, decoys=options["decoys"], align=not options["no_align"])
    judged = judged_by(options)
    key = _key_or_claim(key_file, claim, judged, options)
    config = VerifyConfig(examine=examine, sandbox=not options["no_sandbox"], **looked, **judged)
    with Bar(quiet=as_json or not speaks()) as bar:
        found = verify(suspect, key, config, passphrase=passphrase(), progress=bar)
    finish(found, options, as_json)


def _key_or_claim(
    key_file: Path | None, claim: Path | None, judged: dict[str, Any], options: dict[str, Any]
) -> Path | ClaimedKey:
    """What the suspect is held against; a claim is opened by the first commitment."""
    from pathmark.keys import open_claim

    if key_file is not None and claim is None:
        return key_file
    if options["evidence"] is not None:
        raise click.UsageError("--evidence is signed with the owner's key: give --key instead of --claim")
    commitment = judged.pop("commitment")
    if key_file is not None or claim is None or commitment is None:
        raise click.UsageError("give --key KEY, or --claim CLAIM with its --commitment FILE")
    return open_claim(claim, commitment)


def examine_config(options: dict[str, Any], **more: Any) -> ExamineConfig:
    """How to look at a suspect, from the options that verify and trace share."""
    from pathmark.verification import ExamineConfig

    shared = {name: options[name] for name in ("tokens", "stream", "trust_remote_code")}
    return ExamineConfig(n_probes=options["n_texts"], placement=placed(options), **shared, **more)
