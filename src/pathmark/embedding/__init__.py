"""Embedding: losses (pure) -> data -> embedder."""

from pathmark.embedding.data import DataConfig, Row, chat_frames, draw_rows
from pathmark.embedding.embedder import EmbedConfig, Embedder, default_config
from pathmark.embedding.marks import MarkConfig, MarkEmbedder
from pathmark.embedding.objective import ObjectiveConfig
from pathmark.embedding.prefixes import NEAR_MISSES, near_miss, replace_tokens

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
