"""Learning rates for models of any width."""

from __future__ import annotations


def learning_rate(hidden_size: int) -> float:
    """Peak rate for a model of this width: 0.007 at width 128, in inverse proportion elsewhere.

    Measured at width 128 only; for wider models it is the usual scaling of Adam's rate, a place to start.
    """
    return 0.9 / hidden_size
