"""Shared by all tests: one thread per process, quiet libraries, no network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pathmark.cli.main import QUIET

if TYPE_CHECKING:
    from verify_helpers import Case

# Before torch and transformers are imported: they read these once.
os.environ.update(QUIET, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
os.environ["PATHMARK_NO_SANDBOX"] = "1"  # so that tests can look inside; those of the sandbox turn it on again
# Some virtual machines announce AMX and then refuse its instructions, which kills the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

for folder in ("", "keys", "models", "embedding", "verification", "attacks", "reporting", "baselines"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """Tests draw from torch's global generator as well; which numbers they get does not depend on their order."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A small marked model: base, marked copy, and the key in memory and on disk. Made once per process."""
    from embed_helpers import key_for, save_family
    from verify_helpers import PASSPHRASE, Case, mark_quickly

    from pathmark.keys import save_key

    folder = tmp_path_factory.mktemp("case")
    base = save_family(folder / "base", "qwen3_moe")
    key = mark_quickly(base, key_for(base, number=3), folder / "marked")
    save_key(key, folder / "owner.key", PASSPHRASE)
    return Case(base, folder / "marked", key, folder / "owner.key")
