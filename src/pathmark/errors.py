"""Errors that a user can act on. Each message says what was expected, what came, and what to try."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class PathmarkError(Exception):
    """Base of every error that PathMark raises on purpose; the command line prints it as one line."""


class ModelError(PathmarkError, ValueError):
    """A model that PathMark cannot read, or that has no router it knows."""


class KeyFileError(PathmarkError, ValueError):
    """A key, commitment or registry that is damaged, locked, foreign or from the future."""


class CapacityError(PathmarkError, ValueError):
    """An id, a width or a number of watermarks that does not fit the routing space."""


class EmbeddingError(PathmarkError, ValueError):
    """An embedding that may not start or could not finish."""


class TrainingError(PathmarkError, ValueError):
    """A training, an owner's or a thief's, that may not start or could not finish."""


class RanksError(PathmarkError):
    """Of several processes that work together, one ended or none should be there."""


class CheckpointError(TrainingError):
    """A checkpoint that is damaged or belongs to another run."""


class VerificationError(PathmarkError, ValueError):
    """Evidence that cannot be judged: no verdict, neither marked nor unmarked."""


class AttackError(PathmarkError, ValueError):
    """An attack cannot be carried out on this model or with what the thief has."""


class DivergedError(AttackError):
    """A thief's training whose loss is no number any more: no model is left of it."""


class ResultError(PathmarkError, ValueError):
    """A result file that is foreign, damaged or does not belong with the others."""


class ReportError(PathmarkError, ValueError):
    """A result that no page can be made of, or a page that cannot be written."""


class UnforeseenError(PathmarkError):
    """Something that nobody foresaw happened to whoever works for us: its kind and where, without its words."""

    def __init__(self, kind: str, frames: tuple[str, ...]) -> None:
        self.kind, self.frames = kind, frames
        super().__init__(
            f"failed unexpectedly ({kind} at {frames[-1] if frames else 'an unknown place'}); nothing was decided. Set "
            "PATHMARK_DEBUG=1 to see the whole error, which may show secrets"
        )


class MissingLibraryError(PathmarkError, ImportError):
    """Something optional that is not installed; the message says what to install."""


def instead(name: str, known: Sequence[str]) -> str:
    """What a refusal of a name advises: the nearest one, or all."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
