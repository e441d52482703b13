"""Embedding: losses (pure) -> data -> embedder."""

from pathmark.embed.data import DataConfig, Row, chat_frames, draw_rows, wrong_trigger
from pathmark.embed.embedder import EmbedConfig, Embedder, default_config
from pathmark.embed.objective import ObjectiveConfig

__all__ = [
    "DataConfig",
    "EmbedConfig",
    "Embedder",
    "ObjectiveConfig",
    "Row",
    "chat_frames",
    "default_config",
    "draw_rows",
    "wrong_trigger",
]
