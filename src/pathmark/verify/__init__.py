"""Verification: measured routing in, measures and p-values out. Never imports `embed`.

    examined = examine("./suspect", key, ExamineConfig())       # open it, run the probes, match the experts
    verdict = judge(key, examined.evidence)                     # exact test, both readings, id
    verdict.marked, verdict.p, verdict.words()

`verify_model` does both on a loaded model; `examine_routes` reads what somebody else recorded; `trace_copy` names a
licensee; `verify_api` asks an API, or a model in memory through `LocalBackend`.
"""

from pathmark.verify.anchor import Anchor, judge_anchor
from pathmark.verify.api import ApiClient, ApiSettings
from pathmark.verify.blackbox import verify_api
from pathmark.verify.caselog import write_log
from pathmark.verify.decode import DecodedId, decode_id
from pathmark.verify.evidence import Evidence, record_evidence
from pathmark.verify.local import LocalBackend
from pathmark.verify.mark_verdict import BlackBoxVerdict
from pathmark.verify.measures import LayerScore, PathScore, measure_layers, score_path, target_mass
from pathmark.verify.profiles import attach_profiles
from pathmark.verify.routes import Routes, encode_probes, record_routes
from pathmark.verify.suspect import ExamineConfig, Examined, examine, examine_routes, with_reference
from pathmark.verify.tracing import TracedCopy, trace_copy
from pathmark.verify.whitebox import Verdict, judge, verify_model

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
