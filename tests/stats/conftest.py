from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "null_calibration.py"


@pytest.fixture(scope="session")
def null_data() -> ModuleType:
    """The benchmark that draws the calibration plot: tests use the same unmarked routing."""
    spec = importlib.util.spec_from_file_location("null_calibration", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
