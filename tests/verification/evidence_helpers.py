"""What tests of evidence bundles share."""

from __future__ import annotations

import base64
import json

from click.testing import CliRunner

import pathmark
from pathmark.cli.main import cli
from pathmark.errors import PathmarkError

QUICK = pathmark.ExamineConfig(n_probes=6, decoys=2)


def run(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit | PathmarkError):
        raise result.exception
    return result


def secrets_of(key, watermark):
    """What must not be read by anybody: in every form in which it could leak."""
    mark = key.watermarks[watermark]
    found = [mark.subkey.reveal(), mark.subkey.reveal().hex().encode(), base64.b64encode(mark.subkey.reveal())]
    for trigger in mark.triggers:
        for phrase in (trigger.phrase, trigger.mark):
            tokens = list(phrase.tokens)
            found += [phrase.text.strip().encode(), json.dumps(tokens).encode(), json.dumps(tokens)[1:-1].encode()]
    return found
