"""`pathmark.unpack`: what was packed for an engine, as a folder to verify."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pathmark.errors import ModelError
from pathmark.front_door import sandbox
from pathmark.models.gguf import Unpacked, unpack_gguf
from pathmark.progress import Progress, Silent


@dataclass(frozen=True)
class UnpackedFolder:
    """A folder, and what it was before."""

    output: Path
    found: Unpacked

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark unpack --json`."""
        return {"output": str(self.output), **asdict(self.found)}

    def words(self) -> str:
        """What was found and what to do with it, in sentences."""
        kinds = ", ".join(f"{count} tensors in {kind}" for kind, count in self.found.packed.items())
        no_tokenizer = "" if self.found.tokenizer else " Its tokenizer could not be read; verification does without."
        return (
            f"Written to {self.output}: a model of llama.cpp's architecture {self.found.architecture}, with {kinds}."
            f"{no_tokenizer} Try: pathmark verify {self.output} --key owner.key"
        )


def unpack(
    file: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: Literal["fp32", "bf16"] = "fp32",
    sandboxed: bool = False,
    progress: Progress | None = None,
) -> UnpackedFolder:
    """Unpack the GGUF file of a suspect, so that `verify` and `trace` can look into its weights.

    `sandboxed` reads it in a child process without network, as the command line does.

    Example:
        pathmark.unpack("suspect-Q4_K_M.gguf", "suspect").words()
    """
    source, out = Path(file), Path(output)
    if not source.is_file():
        what = "a folder" if source.is_dir() else "not there"
        raise ModelError(f"expected a GGUF file, got {source}, which is {what}")
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    # a sandbox may be ended at any moment, and then removes nothing behind itself
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as stage:
        made = Path(stage) / out.name

        def job(say: Progress) -> Unpacked:
            say.stage("unpacking", None)
            return unpack_gguf(source, made, dtype)

        limits = sandbox.Limits(silence=600.0 + source.stat().st_size / 1e6)
        found = sandbox.run(job, limits, progress) if sandboxed else job(progress or Silent())
        made.rename(out)
    return UnpackedFolder(out, found)
