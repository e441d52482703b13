"""Embedding: one trainer, and an objective per file. rows (data, prefixes) -> objective -> trainer."""

from pathmark.embedding.anchored import Anchored, AnchoredConfig
from pathmark.embedding.config import EmbedConfig
from pathmark.embedding.data import DataConfig, Row, chat_frames, draw_rows
from pathmark.embedding.objective import Context, Objective
from pathmark.embedding.paper import Paper, PaperConfig
from pathmark.embedding.prefixes import NEAR_MISSES, near_miss, replace_tokens
from pathmark.embedding.recipes import default_config, steps_for
from pathmark.embedding.replies import Replies, RepliesConfig
from pathmark.embedding.trainer import Trainer, embed_key

__all__ = [
    "NEAR_MISSES",
    "Anchored",
    "AnchoredConfig",
    "Context",
    "DataConfig",
    "EmbedConfig",
    "Objective",
    "Paper",
    "PaperConfig",
    "Replies",
    "RepliesConfig",
    "Row",
    "Trainer",
    "chat_frames",
    "default_config",
    "draw_rows",
    "embed_key",
    "near_miss",
    "replace_tokens",
    "steps_for",
]
