"""Verification: measured routing in, measures and p-values out. Never imports `embed`.

    examined = examine("./suspect", key, ExamineConfig())       # open it, run the probes, match the experts
    verdict = judge(key, examined.evidence)                     # exact test, both readings, id
    verdict.marked, verdict.p, verdict.words()

`verify_model` does both on a loaded model; `examine_routes` reads what somebody else recorded; `trace_copy` names a
licensee; `verify_api` asks an API, or a model in memory through `LocalBackend`.
"""

from pathmark.verification.anchor import Anchor, judge_anchor
from pathmark.verification.api import ApiClient, ApiSettings
from pathmark.verification.blackbox import verify_api
from pathmark.verification.caselog import write_log
from pathmark.verification.decode import DecodedId, decode_id
from pathmark.verification.evidence import Evidence, record_evidence
from pathmark.verification.local import LocalBackend
from pathmark.verification.mark_verdict import BlackBoxVerdict
from pathmark.verification.measures import LayerScore, PathScore, measure_layers, score_path, target_mass
from pathmark.verification.profiles import attach_profiles
from pathmark.verification.routes import Routes, encode_probes, record_routes
from pathmark.verification.suspect import ExamineConfig, Examined, examine, examine_routes, with_reference
from pathmark.verification.tracing import TracedCopy, trace_copy
from pathmark.verification.whitebox import Verdict, judge, verify_model

__all__ = [
    "Anchor",
    "ApiClient",
    "ApiSettings",
    "BlackBoxVerdict",
    "DecodedId",
    "Evidence",
    "ExamineConfig",
    "Examined",
    "LayerScore",
    "LocalBackend",
    "PathScore",
    "Routes",
    "TracedCopy",
    "Verdict",
    "attach_profiles",
    "decode_id",
    "encode_probes",
    "examine",
    "examine_routes",
    "judge",
    "judge_anchor",
    "measure_layers",
    "record_evidence",
    "record_routes",
    "score_path",
    "target_mass",
    "trace_copy",
    "verify_api",
    "verify_model",
    "with_reference",
    "write_log",
]
