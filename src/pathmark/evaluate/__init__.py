"""Experiments of the paper and beyond: models in, documented results out."""

from pathmark.evaluate.fidelity import Drift, Measurement, drift, measure
from pathmark.evaluate.scan import ScanConfig, trigger_scan
from pathmark.evaluate.selfcheck import SelfCheck, self_check

__all__ = ["Drift", "Measurement", "ScanConfig", "SelfCheck", "drift", "measure", "self_check", "trigger_scan"]
