"""Verification: measured routing or replies in, a verdict out. Never imports `embedding`.

    examined = examine("./suspect", key, ExamineConfig())       # open it, run the probes, match the experts
    verdict = judge(key, examined.evidence)                     # exact test, both readings, id
    verdict.marked, verdict.p, verdict.words()

`verify_model` does both on a loaded model; `examine_routes` reads what somebody else recorded; `trace_copy` names a
licensee; `verify_api` asks an API, or a model in memory through `LocalBackend`. `Criteria` say what decides.

Verdicts and their words are in `pathmark.verdicts`. `paths` judges routing evidence, which `weights` measures and
`recorded` reads from files; `blackbox` has replies only. These three don't know each other.
"""

from pathmark.verdicts.claims import Anchor, judge_anchor
from pathmark.verdicts.criteria import Criteria
from pathmark.verdicts.verdict import Verdict
from pathmark.verification.blackbox.api import ApiClient, ApiSettings
from pathmark.verification.blackbox.asking import AskConfig, verify_api
from pathmark.verification.blackbox.judging import ReplyVerdict
from pathmark.verification.blackbox.local import LocalBackend
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.paths.caselog import write_log
from pathmark.verification.paths.decode import DecodedId, decode_id
from pathmark.verification.paths.disclosure import disclose
from pathmark.verification.paths.evidence import Evidence, Examined, ReadWith
from pathmark.verification.paths.judging import PathVerdict, judge
from pathmark.verification.paths.measures import measure_layers, score_path, target_mass
from pathmark.verification.paths.routes import Routes
from pathmark.verification.paths.tracing import TracedCopy, trace_copy
from pathmark.verification.recorded.routes_only import examine_routes
from pathmark.verification.weights.profiles import attach_original, attach_profiles
from pathmark.verification.weights.recording import (
    count_rows,
    encode_probes,
    record_evidence,
    record_grafted,
    record_routes,
)
from pathmark.verification.weights.suspect import ExamineConfig, examine, verify_model, with_reference

__all__ = [
    "Anchor",
    "ApiClient",
    "ApiSettings",
    "AskConfig",
    "Criteria",
    "DecodedId",
    "Evidence",
    "ExamineConfig",
    "Examined",
    "LocalBackend",
    "PathVerdict",
    "ReadWith",
    "ReplyVerdict",
    "Routes",
    "TracedCopy",
    "Verdict",
    "attach_original",
    "attach_profiles",
    "count_rows",
    "decode_id",
    "disclose",
    "encode_probes",
    "examine",
    "examine_routes",
    "judge",
    "judge_anchor",
    "measure_layers",
    "profile_texts",
    "record_evidence",
    "record_grafted",
    "record_routes",
    "score_path",
    "target_mass",
    "trace_copy",
    "verify_api",
    "verify_model",
    "with_reference",
    "write_log",
]
