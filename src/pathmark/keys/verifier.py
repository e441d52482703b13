"""What verification needs of a key. An owner's key has it, and the secret; an arbiter has what a claim opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from pathmark.keys.facts import ModelFacts
from pathmark.keys.watermark import Watermark


@dataclass(frozen=True)
class Attachment:
    """Data that was added to a key after it was made, such as expert sketches."""

    revision: int
    """The key's revision from which on it holds."""
    name: str
    digest: str
    """sha256 of the data."""
    size: int


class VerifierKey(ABC):
    """Watermarks, the model they were made for, and what is attached: enough to look for them in a suspect."""

    model: ModelFacts
    watermarks: tuple[Watermark, ...]
    history: tuple[Attachment, ...]
    """Everything ever attached, by rising revision; the last entry of a name is the current one."""
    attachments: Mapping[str, bytes]
    """Current data by name."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Public name of the key."""

    @abstractmethod
    def derive_seed(self, purpose: str) -> int:
        """A 63-bit seed for anything that must be random yet repeatable."""

    @property
    def revision(self) -> int:
        """0 for a new key, one more with every attachment."""
        return self.history[-1].revision if self.history else 0

    @property
    def layers(self) -> tuple[int, ...]:
        """All marked layers, rising, each once."""
        return tuple(sorted({layer for watermark in self.watermarks for layer in watermark.layers}))

    def attachments_at(self, revision: int) -> dict[str, Attachment]:
        """Name -> entry as of a revision."""
        return {entry.name: entry for entry in self.history if entry.revision <= revision}
