"""One optimiser loop and vocabulary-sized losses, shared by embedding and by attacks."""

from pathmark.training.loop import LoopConfig, LoopResult, only_trainable, run_loop, step_generator
from pathmark.training.memory import keep_freed_memory
from pathmark.training.vocabulary import linear_cross_entropy, linear_distillation

__all__ = [
    "LoopConfig",
    "LoopResult",
    "keep_freed_memory",
    "linear_cross_entropy",
    "linear_distillation",
    "only_trainable",
    "run_loop",
    "step_generator",
]
