"""Shared by all tests: one thread per process, quiet libraries, no network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pathmark.cli.main import QUIET

# Before torch and transformers are imported: they read these once.
os.environ.update(QUIET, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

for folder in ("models", "embed"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
