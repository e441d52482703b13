"""Statistics on plain arrays: what was seen, how surprising it is, and what may be concluded.

`accuracy` turns routing arrays into the paper's measures (Acc_l, Acc, WSR as `Rate`) and into differences
per expert; `exact` tests those differences against every path the key could have had; `combine` joins
watermarks and charges for what else was tried; `marks` bounds black-box replies; `tracing` names a licensee.
`latency` tests paired times. `paper` holds the paper's own formulas, for comparison. numpy and the standard
library only.
"""

from pathmark.stats.accuracy import (
    accuracy,
    hits_from_probs,
    hits_from_selection,
    layer_accuracy,
    mass_difference,
    probe_accuracy,
    selection_difference,
    wsr,
)
from pathmark.stats.combine import GRINDING_BITS, Family, bonferroni, fisher, third_party_p
from pathmark.stats.exact import (
    CombinedResult,
    ExactResult,
    LayerEvidence,
    LayerMeasurement,
    exact_test,
    exact_test_many,
    null_distribution,
    path_statistic,
)
from pathmark.stats.latency import (
    LatencyEffect,
    detectable_effect,
    fewest_pairs,
    log_ratios,
    median_effect,
    pairs_needed,
    sign_flip_test,
    two_sided,
)
from pathmark.stats.marks import MarkTrial, marks_p
from pathmark.stats.null import NullDistribution, Tail
from pathmark.stats.paper import (
    any_hit_null,
    binomial_p,
    capacity_bits,
    concentration_mean,
    concentration_pooled,
    detection_samples,
    detection_samples_paper,
    evidence_bits,
    gradient_balance_alpha,
    kl_bound,
    kl_bound_paper,
    kl_constant,
    latency_margin,
    paper_bound,
)
from pathmark.stats.pvalue import PValue
from pathmark.stats.rate import Rate
from pathmark.stats.tracing import Collusion, TraceResult, collusion, trace

__all__ = [
    "GRINDING_BITS",
    "Collusion",
    "CombinedResult",
    "ExactResult",
    "Family",
    "LatencyEffect",
    "LayerEvidence",
    "LayerMeasurement",
    "MarkTrial",
    "NullDistribution",
    "PValue",
    "Rate",
    "Tail",
    "TraceResult",
    "accuracy",
    "any_hit_null",
    "binomial_p",
    "bonferroni",
    "capacity_bits",
    "collusion",
    "concentration_mean",
    "concentration_pooled",
    "detectable_effect",
    "detection_samples",
    "detection_samples_paper",
    "evidence_bits",
    "exact_test",
    "exact_test_many",
    "fewest_pairs",
    "fisher",
    "gradient_balance_alpha",
    "hits_from_probs",
    "hits_from_selection",
    "kl_bound",
    "kl_bound_paper",
    "kl_constant",
    "latency_margin",
    "layer_accuracy",
    "log_ratios",
    "marks_p",
    "mass_difference",
    "median_effect",
    "null_distribution",
    "pairs_needed",
    "paper_bound",
    "path_statistic",
    "probe_accuracy",
    "selection_difference",
    "sign_flip_test",
    "third_party_p",
    "trace",
    "two_sided",
    "wsr",
]
