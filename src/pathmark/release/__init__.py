"""The owner's job before a release: plan a key, mark a model folder, check that the copy is fit."""

from pathmark.release.fidelity import Drift, Measurement, drift, measure
from pathmark.release.marking import Marked, MarkingConfig, Texts, mark_model
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.release.scan import ScanConfig, trigger_scan
from pathmark.release.selfcheck import SelfCheck, self_check

__all__ = [
    "Drift",
    "KeyPlan",
    "Marked",
    "MarkingConfig",
    "Measurement",
    "ScanConfig",
    "SelfCheck",
    "Texts",
    "drift",
    "mark_model",
    "measure",
    "plan_key",
    "self_check",
    "trigger_scan",
]
