"""What embedding and attacks share: one optimiser loop, the cache of lower layers, rates, vocabulary-sized losses."""

from pathmark.training.cache import Batch, TeacherCache
from pathmark.training.loop import LoopConfig, LoopResult, only_trainable, run_loop, step_generator
from pathmark.training.memory import keep_freed_memory
from pathmark.training.rates import learning_rate
from pathmark.training.vocabulary import linear_cross_entropy, linear_distillation

__all__ = [
    "Batch",
    "LoopConfig",
    "LoopResult",
    "TeacherCache",
    "keep_freed_memory",
    "learning_rate",
    "linear_cross_entropy",
    "linear_distillation",
    "only_trainable",
    "run_loop",
    "step_generator",
]
