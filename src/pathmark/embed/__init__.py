"""Embedding: losses (pure) -> data -> embedder."""

from pathmark.embed.data import NEGATIVE_KINDS, DataConfig, Row, chat_frames, draw_rows, wrong_trigger
from pathmark.embed.embedder import EmbedConfig, Embedder, default_config
from pathmark.embed.marks import MarkConfig, MarkEmbedder
from pathmark.embed.objective import ObjectiveConfig

__all__ = [
    "NEGATIVE_KINDS",
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
    "wrong_trigger",
]
