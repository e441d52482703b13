"""What embedding and attacks share: optimiser loop, cache of lower layers, rates, losses, fingerprints of runs."""

from pathmark.training.cache import Batch, TeacherCache
from pathmark.training.fingerprint import run_fingerprint
from pathmark.training.loop import Constraints, LoopConfig, LoopResult, only_trainable, run_loop, step_generator
from pathmark.training.memory import keep_freed_memory
from pathmark.training.rates import learning_rate
from pathmark.training.vocabulary import linear_cross_entropy, linear_distillation

__all__ = [
    "Batch",
    "Constraints",
    "LoopConfig",
    "LoopResult",
    "TeacherCache",
    "keep_freed_memory",
    "learning_rate",
    "linear_cross_entropy",
    "linear_distillation",
    "only_trainable",
    "run_fingerprint",
    "run_loop",
    "step_generator",
]
