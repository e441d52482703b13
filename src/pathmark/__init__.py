"""PathMark: ownership marks in the routing paths of Mixture-of-Experts language models.

A tour, from a key to the name of a leaking licensee:

    made = pathmark.make_key("bundled:tiny", output="owner.key")        # what is secret
    copy = pathmark.embed("bundled:tiny", "owner.key", "marked")        # a marked folder, checked
    found = pathmark.verify("marked", "owner.key")                      # the exact test
    copy.words(), found.marked, found.p, found.summary()

`verify_api` and `verify_routes` do the same through an API and from recorded routes, `trace` names a licensee,
`attack` does what a thief would do, `commit` dates a key, `report` makes a page. Each has its options in one config
and returns a result with `.summary()` and `.words()`.

Below that door:

    model = pathmark.load_model("bundled:tiny")             # safetensors only
    with pathmark.record_routing(model, [6, 7]) as trace:
        model(input_ids=ids, attention_mask=mask)
    trace[7].probs_BTE, trace[7].decision_BTK               # g and the experts each token went to

Everything here is imported when it is first used: `import pathmark` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathmark.errors import PathmarkError as PathmarkError
    from pathmark.front_door.attack import AttackConfig as AttackConfig
    from pathmark.front_door.attack import AttackResult as AttackResult
    from pathmark.front_door.attack import attack as attack
    from pathmark.front_door.bundle import EvidenceConfig as EvidenceConfig
    from pathmark.front_door.card import Card as Card
    from pathmark.front_door.card import card as card
    from pathmark.front_door.commit import Committed as Committed
    from pathmark.front_door.commit import commit as commit
    from pathmark.front_door.doctor import Examination as Examination
    from pathmark.front_door.doctor import doctor as doctor
    from pathmark.front_door.embed import Embedded as Embedded
    from pathmark.front_door.embed import embed as embed
    from pathmark.front_door.embed_all import Copies as Copies
    from pathmark.front_door.embed_all import embed_all as embed_all
    from pathmark.front_door.embed_plan import EmbedPlan as EmbedPlan
    from pathmark.front_door.evidence import EvidenceCheck as EvidenceCheck
    from pathmark.front_door.evidence import Replay as Replay
    from pathmark.front_door.evidence import check_evidence as check_evidence
    from pathmark.front_door.evidence import replay_evidence as replay_evidence
    from pathmark.front_door.inspection import InspectConfig as InspectConfig
    from pathmark.front_door.inspection import Inspection as Inspection
    from pathmark.front_door.inspection import inspect_model as inspect_model
    from pathmark.front_door.make_key import MadeKey as MadeKey
    from pathmark.front_door.make_key import make_key as make_key
    from pathmark.front_door.plan import PlanConfig as PlanConfig
    from pathmark.front_door.plan import plan as plan
    from pathmark.front_door.report import Report as Report
    from pathmark.front_door.report import report as report
    from pathmark.front_door.reproduce import Reproduced as Reproduced
    from pathmark.front_door.reproduce import ReproducePlan as ReproducePlan
    from pathmark.front_door.reproduce import reproduce as reproduce
    from pathmark.front_door.schemes import MadeSchemeKey as MadeSchemeKey
    from pathmark.front_door.schemes import SchemeEmbedded as SchemeEmbedded
    from pathmark.front_door.schemes import SchemePlan as SchemePlan
    from pathmark.front_door.schemes import SchemeVerification as SchemeVerification
    from pathmark.front_door.schemes import embed_scheme as embed_scheme
    from pathmark.front_door.schemes import make_scheme_key as make_scheme_key
    from pathmark.front_door.schemes import verify_scheme as verify_scheme
    from pathmark.front_door.trace import TraceConfig as TraceConfig
    from pathmark.front_door.trace import Traced as Traced
    from pathmark.front_door.trace import trace as trace
    from pathmark.front_door.trace import trace_routes as trace_routes
    from pathmark.front_door.unpack import UnpackedFolder as UnpackedFolder
    from pathmark.front_door.unpack import unpack as unpack
    from pathmark.front_door.verify import RoutesConfig as RoutesConfig
    from pathmark.front_door.verify import Verification as Verification
    from pathmark.front_door.verify import VerifyConfig as VerifyConfig
    from pathmark.front_door.verify import verify as verify
    from pathmark.front_door.verify import verify_routes as verify_routes
    from pathmark.front_door.verify_api import ApiConfig as ApiConfig
    from pathmark.front_door.verify_api import verify_api as verify_api
    from pathmark.keys import OwnerKey as OwnerKey
    from pathmark.keys import Registry as Registry
    from pathmark.keys import load_key as load_key
    from pathmark.keys import open_claim as open_claim
    from pathmark.models import find_routers as find_routers
    from pathmark.models import load_model as load_model
    from pathmark.models import load_tokenizer as load_tokenizer
    from pathmark.models import perplexity as perplexity
    from pathmark.models import record_routing as record_routing
    from pathmark.release.planning import KeyPlan as KeyPlan
    from pathmark.stats import Family as Family
    from pathmark.verification import Criteria as Criteria
    from pathmark.verification import ExamineConfig as ExamineConfig
    from pathmark.verification import PathVerdict as PathVerdict
    from pathmark.verification import ReplyVerdict as ReplyVerdict
    from pathmark.verification import TracedCopy as TracedCopy
    from pathmark.verification import Verdict as Verdict

_HOMES = {
    "errors": "PathmarkError",
    "front_door.attack": "AttackConfig AttackResult attack",
    "front_door.card": "Card card",
    "front_door.commit": "Committed commit",
    "front_door.doctor": "Examination doctor",
    "front_door.embed": "Embedded embed",
    "front_door.embed_all": "Copies embed_all",
    "front_door.embed_plan": "EmbedPlan",
    "front_door.plan": "PlanConfig plan",
    "front_door.bundle": "EvidenceConfig",
    "front_door.evidence": "EvidenceCheck Replay check_evidence replay_evidence",
    "front_door.inspection": "InspectConfig Inspection inspect_model",
    "front_door.make_key": "MadeKey make_key",
    "front_door.report": "Report report",
    "front_door.reproduce": "ReproducePlan Reproduced reproduce",
    "front_door.schemes": "MadeSchemeKey SchemeEmbedded SchemePlan SchemeVerification embed_scheme make_scheme_key "
    "verify_scheme",
    "front_door.trace": "TraceConfig Traced trace trace_routes",
    "front_door.unpack": "UnpackedFolder unpack",
    "front_door.verify": "RoutesConfig Verification VerifyConfig verify verify_routes",
    "front_door.verify_api": "ApiConfig verify_api",
    "keys": "OwnerKey Registry load_key open_claim",
    "models": "find_routers load_model load_tokenizer perplexity record_routing",
    "release.planning": "KeyPlan",
    "stats": "Family",
    "verification": "Criteria ExamineConfig PathVerdict ReplyVerdict TracedCopy Verdict",
}
"""Module -> what is had from it."""
_EXPORTS = {name: f"pathmark.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = [*sorted(_EXPORTS), "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("pathmark")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pathmark' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
