"""Decoy triggers: what the suspect does behind the triggers of keys that nobody embedded.

A control, not a test: if the owner's path lights up behind strangers' triggers as well, the suspect reacts to odd
prefixes as such, and the verdict has to say so.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from pathmark.keys import TextCodec, VerifierKey, WatermarkRequest, create_key
from pathmark.stats import PValue


@dataclass(frozen=True)
class DecoyControl:
    """The owner's path behind decoy triggers: p-values that should look like those of chance."""

    p_values: tuple[PValue, ...]
    """Exact p-value of the owner's path behind each decoy, uncharged."""
    n_probes: int

    @property
    def smallest(self) -> PValue:
        """The most suspicious one, charged for their number."""
        return min(self.p_values).charged(math.log10(len(self.p_values)))

    def __str__(self) -> str:
        shown = ", ".join(str(p) for p in self.p_values)
        return f"{len(self.p_values)} decoy triggers on {self.n_probes} texts: p = {shown}"

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {"p_values": [p.value for p in self.p_values], "n_probes": self.n_probes}


def decoy_triggers(key: VerifierKey, codec: TextCodec, count: int) -> list[tuple[int, ...]]:
    """Triggers of another key for the same model, of the same length as the owner's; the same every time."""
    own = key.watermarks[0]
    request = WatermarkRequest(plans=own.plans, triggers=count, trigger_tokens=len(own.triggers[0].tokens))
    secret = random.Random(key.derive_seed("decoys")).randbytes(32)
    stranger, _ = create_key(key.model, [request], codec, secret=secret)
    return [trigger.tokens for trigger in stranger.watermarks[0].triggers]
