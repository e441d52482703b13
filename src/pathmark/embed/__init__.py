"""Embedding: losses (pure) -> data -> embedder."""

from pathmark.embed.data import DataConfig, Row, chat_frames, draw_rows
from pathmark.embed.embedder import EmbedConfig, Embedder, default_config
from pathmark.embed.marks import MarkConfig, MarkEmbedder
from pathmark.embed.objective import ObjectiveConfig
from pathmark.embed.prefixes import NEAR_MISSES, near_miss, replace_tokens

__all__ = [
    "NEAR_MISSES",
    "DataConfig",
    "EmbedConfig",
    "Embedder",
    "MarkConfig",
    "MarkEmbedder",
    "ObjectiveConfig",
    "Row",
    "chat_frames",
    "default_config",
    "draw_rows",
    "near_miss",
    "replace_tokens",
]
