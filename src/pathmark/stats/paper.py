"""The paper's formulas, one function each, as printed. Each docstring names its place in the paper.

They are here to be compared with, not to be relied upon: where a formula does not give what the paper
says it gives, the docstring tells. PathMark's own verdict is `pathmark.stats.exact`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pathmark.errors import CapacityError, VerificationError
from pathmark.stats.pvalue import PValue


def _check_width(n_experts: int, width: int) -> None:
    if not 1 <= width <= n_experts:
        raise CapacityError(f"expected 1 <= width <= n_experts, got width={width}, n_experts={n_experts}")


def capacity_bits(n_experts: int, width: int, n_layers: int) -> float:
    """Cap = |L_w| * log2(N/k) bits (section "Watermark Capacity").

    Id capacity, not evidence: see `evidence_bits`.
    """
    _check_width(n_experts, width)
    return n_layers * math.log2(n_experts / width)


def evidence_bits(pool_size: int, width: int, n_layers: int) -> float:
    """log2 of the number of paths when targets are any k-subsets of the pool: minus log2 of the p floor."""
    _check_width(pool_size, width)
    return n_layers * math.log2(math.comb(pool_size, width))


def paper_bound(accuracy: float, n_decisions: int, n_experts: int, width: int) -> PValue:
    """exp(-2n(gamma - k/N)^2), the theorem "Statistical Verification" (Hoeffding), with gamma = accuracy.

    Kept for comparison only. It supposes that experts are equally popular and that the n decisions are
    independent, and k/N is the rate of a top-1 hit while Acc counts any hit in the top k. None of the
    three holds on a real model: docs/statistics.md shows by how much it errs.
    """
    _check_width(n_experts, width)
    if not 0 <= accuracy <= 1 or n_decisions < 1:
        raise VerificationError(f"expected accuracy in [0, 1] and n_decisions >= 1, got {accuracy} and {n_decisions}")
    excess = max(0.0, accuracy - width / n_experts)
    return PValue.capped(-2 * n_decisions * excess**2 / math.log(10))


def binomial_p(hits: int, n: int, p0: float = 0.01) -> PValue:
    """P(Binomial(n, p0) >= hits), the test behind Table 1 ("Evaluation Metrics", p0 = 0.01), exactly.

    The p-values printed in the paper's Table 1 do not follow from it: 100 of 100 gives 1e-200.
    """
    if not 0 <= hits <= n or n < 1 or not 0 < p0 < 1:
        raise VerificationError(f"expected 0 <= hits <= n, n >= 1, 0 < p0 < 1, got hits={hits}, n={n}, p0={p0}")
    if hits == 0:
        return PValue(0.0)
    log_odds = math.log(p0) - math.log1p(-p0)
    logs = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_odds + n * math.log1p(-p0)
        for i in range(hits, n + 1)
    ]
    # Only non-negative terms, scaled by the largest: the tail keeps its relative precision.
    largest = max(logs)
    total = largest + math.log(math.fsum(math.exp(term - largest) for term in logs))
    return PValue.capped(total / math.log(10))


def any_hit_null(n_experts: int, width: int, n_selected: int | None = None) -> float:
    """1 - C(N-k, s)/C(N, s): the chance that s experts selected at random touch k given targets.

    With s = k (the default) it is the null rate of Acc_l as the paper defines Acc_l, where its theorem
    puts k/N: for Mixtral (N=8, k=2) 0.46, not 0.25. It still supposes equally popular experts.
    """
    selected = width if n_selected is None else n_selected
    _check_width(n_experts, width)
    _check_width(n_experts, selected)
    return 1 - math.comb(n_experts - width, selected) / math.comb(n_experts, selected)


def kl_constant(p_min: float) -> float:
    """C = 1 + 1/(2 p_min), from the proof of the theorem "Routing Distribution Indistinguishability".

    The paper drops it as "about 1"; at its own p_min = 0.1 it is 6.
    """
    if not 0 < p_min <= 1:
        raise VerificationError(f"p_min is a probability in (0, 1], got {p_min}")
    return 1 + 1 / (2 * p_min)


def kl_bound_paper(bound: float, p_min: float) -> float:
    """B^2 / p_min, the stealth theorem as stated.

    Its last step uses E[X^2] <= E[X]^2, which points the other way, and it drops `kl_constant`.
    """
    kl_constant(p_min)  # the same domain
    return bound**2 / p_min


def kl_bound(mean_squared_change: float, p_min: float) -> float:
    """C * E[||g_w - g_0||^2] / p_min: the stealth theorem before its faulty last step.

    `mean_squared_change` is the mean of the *squared* L2 change, measured, not the square of a mean.
    """
    return kl_constant(p_min) * mean_squared_change / p_min


def detection_samples(kl: float, alpha: float = 0.05) -> float:
    """N* = 2 ln(1/alpha) / KL, the corollary "Detection Sample Complexity"."""
    if kl <= 0 or not 0 < alpha < 1:
        raise VerificationError(f"expected kl > 0 and 0 < alpha < 1, got kl={kl}, alpha={alpha}")
    return 2 * math.log(1 / alpha) / kl


def detection_samples_paper(bound: float, p_min: float, alpha: float = 0.05) -> float:
    """N* = 2 p_min ln(1/alpha) / B^2, the corollary's second form.

    For B = 0.02 and p_min = 0.1 this is 1.5e3 (the paper prints 1.5e4), for p_min = 0.01 it is 150;
    with the dropped constant C it is another 6 or 51 times smaller.
    """
    return detection_samples(kl_bound_paper(bound, p_min), alpha)


def gradient_balance_alpha(temperature: float, width: int, leakage: float = 0.1) -> float:
    """alpha = 3 t e^(1/t) / (sqrt(k) - beta t e^(1/t)), the lemma "Gradient Balance".

    t is the contrastive temperature tau_T, beta the leakage. 7.1 for t=1, k=2, beta=0.1. The paper calls
    it proportional to t; it scales with t*e^(1/t), which grows again below t = 1.
    """
    if temperature <= 0 or width < 1 or leakage < 0:
        raise VerificationError(
            f"expected temperature > 0, width >= 1, leakage >= 0, got {temperature}, {width}, {leakage}"
        )
    # Above 1/t = 700 the exponential leaves the float range, long after balance has become impossible.
    growth = temperature * math.exp(min(1 / temperature, 700))
    room = math.sqrt(width) - leakage * growth
    if room <= 0:
        raise VerificationError(
            f"no alpha balances the gradients at t={temperature}, k={width}, beta={leakage}: "
            f"sqrt(k) = {math.sqrt(width):.3g} must exceed beta*t*exp(1/t) = {leakage * growth:.3g}"
        )
    return 3 * growth / room


def latency_margin(n_marked: int, top_k: int, n_gpus: int) -> float:
    """(k_c/k_a) * n_GPUs - (1 - k_c/k_a), section "Latency-Based Verification".

    Positive where the paper holds the latency signal to be detectable: k_c watermarked experts,
    k_a experts per token.
    """
    if not 1 <= n_marked <= top_k or n_gpus < 1:
        raise VerificationError(f"expected 1 <= n_marked <= top_k and n_gpus >= 1, got {n_marked}, {top_k}, {n_gpus}")
    share = n_marked / top_k
    return share * n_gpus - (1 - share)


def concentration_mean(triggered: Sequence[float], clean: Sequence[float]) -> float:
    """Mean over layers of (target mass triggered / clean): 17.7 from the paper's white-box table."""
    _check_masses(triggered, clean)
    return math.fsum(t / c for t, c in zip(triggered, clean, strict=True)) / len(clean)


def concentration_pooled(triggered: Sequence[float], clean: Sequence[float]) -> float:
    """Ratio of the summed masses: 14.8 from the same table (14.9 from its rounded averages).

    The mean of ratios is larger because a layer with hardly any clean mass dominates it.
    """
    _check_masses(triggered, clean)
    return math.fsum(triggered) / math.fsum(clean)


def _check_masses(triggered: Sequence[float], clean: Sequence[float]) -> None:
    if len(triggered) != len(clean) or not clean or min(clean) <= 0 or min(triggered) < 0:
        raise VerificationError(
            f"expected one positive clean mass per triggered mass, got {list(triggered)} and {list(clean)}"
        )
