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

DECOYS_SPEAK = 1e-3
"""Where a decoy's rise is this unlikely, after a charge for their number, it is no chance ..."""
AS_LOUD = 0.5
"""... and where it is this share of the trigger's, the trigger is nothing special."""


@dataclass(frozen=True)
class DecoyControl:
    """The owner's path behind decoy triggers: p-values that should look like those of chance."""

    p_values: tuple[PValue, ...]
    """Exact p-value of the owner's path behind each decoy, uncharged."""
    n_probes: int
    loudness: tuple[float, ...] = ()
    """By how much the path's experts rise behind each decoy, as a share of how much they rise behind the trigger."""

    @property
    def speak(self) -> bool:
        """Whether some decoy does what the trigger does: not by chance, and about as strongly.

        The test sees the smallest rise. In a marked model a stranger's trigger may move the path's experts a little
        more than all others; that says nothing against the trigger, which moves them many times as far.
        """
        level = DECOYS_SPEAK / len(self.p_values)
        return any(p.value <= level and loud >= AS_LOUD for p, loud in zip(self.p_values, self.loudness, strict=True))

    @property
    def smallest(self) -> PValue:
        """The most suspicious one, charged for their number."""
        return min(self.p_values).charged(math.log10(len(self.p_values)))

    def __str__(self) -> str:
        shown = ", ".join(str(p) for p in self.p_values)
        told = f"{len(self.p_values)} decoy triggers on {self.n_probes} texts: p = {shown}"
        return f"{told}; the loudest moves the experts {100 * max(self.loudness):.1f} % as far as the trigger"

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        p_values = [p.value for p in self.p_values]
        return {"p_values": p_values, "loudness": list(self.loudness), "n_probes": self.n_probes}


def decoy_triggers(key: VerifierKey, codec: TextCodec, count: int) -> list[tuple[int, ...]]:
    """Triggers of another key for the same model, of the same length as the owner's; the same every time."""
    own = key.watermarks[0]
    request = WatermarkRequest(plans=own.plans, triggers=count, trigger_tokens=len(own.triggers[0].tokens))
    secret = random.Random(key.derive_seed("decoys")).randbytes(32)
    stranger, _ = create_key(key.model, [request], codec, secret=secret)
    return [trigger.tokens for trigger in stranger.watermarks[0].triggers]
