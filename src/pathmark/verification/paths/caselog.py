"""What is kept of a verification: raw results per probe, digests of the suspect, and how it was obtained."""

from __future__ import annotations

import json
import os
import platform
import shutil
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pathmark.errors import KeyFileError, VerificationError
from pathmark.keys import VerifierKey
from pathmark.keys.digests import file_digest
from pathmark.keys.release import hash_release
from pathmark.stats import hits_from_probs, hits_from_selection, probe_accuracy
from pathmark.verification.paths.evidence import Evidence, Examined


def write_log(
    folder: Path,
    key: VerifierKey,
    examined: Examined,
    verdict: dict[str, Any],
    *,
    suspect: str,
    obtained: str,
    original: str | None = None,
) -> None:
    """A new folder with `verdict.json`, `probes.jsonl` and `suspect.json`; whole or not there.

    Nothing in it tells a trigger or a target expert.
    """
    if folder.exists():
        raise VerificationError(f"{folder} already exists; choose another --log, nothing is overwritten")
    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    _write(partial / "verdict.json", json.dumps(verdict, indent=2) + "\n")
    lines = [json.dumps(line) for line in _probe_lines(key, examined)]
    _write(partial / "probes.jsonl", "\n".join(lines) + "\n")
    _write(partial / "suspect.json", json.dumps(_provenance(key, suspect, obtained, original), indent=2) + "\n")
    partial.rename(folder)


def _probe_lines(key: VerifierKey, examined: Examined) -> list[dict[str, Any]]:
    """Per text: its tokens, and for each watermark the accuracy behind its trigger and without one.

    Where the suspect was also fed by the original, that reading's accuracies stand beside them.
    """
    lines: list[dict[str, Any]] = [
        {"probe": i, "tokens": int(n)} for i, n in enumerate(examined.evidence.clean.mask_BT.sum(axis=1))
    ]
    _add_accuracies(lines, key, examined.evidence, "")
    if examined.fed is not None:
        _add_accuracies(lines, key, examined.fed, "grafted_")
    return lines


def _add_accuracies(lines: list[dict[str, Any]], key: VerifierKey, evidence: Evidence, reading: str) -> None:
    for watermark, triggered in zip(key.watermarks, evidence.triggered, strict=True):
        for name, routes in (("triggered", triggered), ("clean", evidence.clean)):
            hits_LBT = np.stack(
                [
                    hits_from_probs(routes.probs[n], watermark.targets(n))
                    if routes.masses_known
                    else hits_from_selection(routes.decisions[n], watermark.targets(n))
                    for n in watermark.layers
                ]
            )
            for line, value in zip(lines, probe_accuracy(hits_LBT, routes.mask_BT), strict=True):
                line[f"accuracy_{reading}{name}_{watermark.index}"] = round(float(value), 6)


def _files(name: str) -> list[dict[str, Any]]:
    path = Path(name)
    try:
        if path.is_dir():
            return [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in hash_release(path)]
        if path.is_file():
            return [{"path": path.name, "size": path.stat().st_size, "sha256": file_digest(path)}]
    except KeyFileError as error:
        raise VerificationError(f"the files of {name} cannot be listed: {error}") from error
    return []


def _provenance(key: VerifierKey, suspect: str, obtained: str, original: str | None) -> dict[str, Any]:
    return {
        "suspect": suspect,
        "obtained": obtained,
        "examined": datetime.now(UTC).isoformat(timespec="seconds"),
        "key": key.fingerprint,
        "key_revision": key.revision,
        "files": _files(suspect),
        "original": None if original is None else {"name": original, "files": _files(original)},
        "pathmark": version("pathmark"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
