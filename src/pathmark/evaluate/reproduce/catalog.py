"""Every experiment by name, in the order of the paper."""

from __future__ import annotations

from pathmark.evaluate.reproduce import fidelity, marks, ours, robustness, routing
from pathmark.evaluate.reproduce.corpora import QUESTIONS
from pathmark.evaluate.reproduce.running import Experiment

_THIEF = (robustness.THIEF,)
EXPERIMENTS: dict[str, Experiment] = {
    "fig-motivation": Experiment(routing.motivation),
    "tab-effectiveness": Experiment(marks.effectiveness, marks.CORPORA),
    "fig-ppl": Experiment(marks.perplexities, ("wikitext", "ptb")),
    "tab-fidelity": Experiment(fidelity.benchmarks, QUESTIONS, fidelity.ASKED),
    "fig-expert-selection": Experiment(routing.expert_selection),
    "tab-whitebox": Experiment(routing.whitebox),
    "blackbox": Experiment(ours.blackbox),
    "tab-quantization": Experiment(robustness.quantization, _THIEF),
    "fig-finetuning": Experiment(robustness.fine_tuning, _THIEF, robustness.SWEEP),
    "fig-pruning": Experiment(robustness.pruning, _THIEF),
    "fig-noise": Experiment(robustness.noise, _THIEF),
    "tab-overwriting": Experiment(robustness.overwriting, _THIEF),
    "tab-expert-removal": Experiment(robustness.expert_removal, _THIEF),
    "fig-unlearning": Experiment(robustness.unlearning, _THIEF),
    "fig-multi-watermark": Experiment(ours.many),
    "tab-latency": Experiment(ours.latency),
    "fig-width-layers": Experiment(ours.width_and_layers, _THIEF, (ours.TUNED_RATE, ours.TUNED_SAMPLES)),
    "tab-lambda": Experiment(ours.route_weight),
    "fig-contrastive": Experiment(routing.contrastive),
    "real-case": Experiment(ours.real_case),
}
