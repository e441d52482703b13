"""One watermark: its triggers, its layers, its candidate groups, and the id that picks the path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb, prod
from typing import NoReturn

from pathmark.errors import CapacityError
from pathmark.keys.canonical import Document
from pathmark.keys.derive import SECRET_BYTES
from pathmark.keys.evidence import bits, path_counts, paths_after_erasures
from pathmark.keys.facts import LayerPlan
from pathmark.keys.ids import IdCode
from pathmark.keys.layout import cut_groups
from pathmark.keys.phrase import Trigger, draw_choices


class Secret:
    """32 bytes that never appear in a repr, a pickle or an error. `reveal()` is the only way out."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(value)}")
        self._value = bytes(value)

    def reveal(self) -> bytes:
        """The bytes themselves, for derivation and for the encrypted file."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(("pathmark secret", self._value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled; pass the path of the key file instead")

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self


@dataclass(frozen=True, repr=False)
class Watermark:
    """One trigger-path pair (or several triggers, one path). Built by a key or from a revealed claim."""

    index: int
    subkey: Secret
    """Secret of this watermark alone; it gives triggers, marks and the order inside the blocks."""
    plans: tuple[LayerPlan, ...]
    """Its layers by rising index, with width and pool."""
    blocks: tuple[tuple[int, ...], ...]
    """Experts this watermark owns, layer by layer: the whole pool unless the layer is shared."""
    triggers: tuple[Trigger, ...]
    id: int
    """The id that this copy carries."""
    redundancy: int = 0
    """Layers that may be lost without losing the id."""

    def __post_init__(self) -> None:
        layers = self.layers
        if list(layers) != sorted(set(layers)) or not layers or len(self.blocks) != len(layers):
            raise CapacityError(f"watermark {self.index}: layers must rise, one block each, at least one")
        for plan, block in zip(self.plans, self.blocks, strict=True):
            if list(block) != sorted(set(block) & set(plan.pool)) or len(block) < plan.width:
                raise CapacityError(f"watermark {self.index}: block of layer {plan.layer} is not inside its pool")
        if not self.triggers:
            raise CapacityError(f"watermark {self.index}: at least one trigger is needed")
        self.group_indices  # noqa: B018 - refuses an id outside the capacity

    def __repr__(self) -> str:
        layers = ",".join(map(str, self.layers))
        return f"Watermark({self.index}, layers {layers}, {len(self.triggers)} trigger(s), hidden)"

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the watermarked layers."""
        return tuple(plan.layer for plan in self.plans)

    def width(self, layer: int) -> int:
        """k: experts in the target set of this layer."""
        return self.plans[self._place(layer)].width

    def pool(self, layer: int) -> tuple[int, ...]:
        """Experts that could have been targets; the null of the exact test."""
        return self.plans[self._place(layer)].pool

    def groups(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """Candidate target sets of this watermark, in the order of their group index."""
        return self._groups[self._place(layer)]

    def targets(self, layer: int) -> tuple[int, ...]:
        """The target experts of the current id, sorted."""
        place = self._place(layer)
        return self._groups[place][self.group_indices[place]]

    def targets_for(self, number: int) -> dict[int, tuple[int, ...]]:
        """Layer -> target experts, for any id."""
        digits = self.encode_id(number)
        return {layer: self._groups[i][digits[i]] for i, layer in enumerate(self.layers)}

    @property
    def path(self) -> dict[int, tuple[int, ...]]:
        """Layer -> target experts of the current id."""
        return self.targets_for(self.id)

    @cached_property
    def group_indices(self) -> tuple[int, ...]:
        """Group index per layer of the current id: what the barcode shows."""
        return self.code.encode(self.id)

    @cached_property
    def code(self) -> IdCode:
        """The code between ids and group indices."""
        radices = (len(b) // p.width for b, p in zip(self.blocks, self.plans, strict=True))
        return IdCode(tuple(radices), self.redundancy)

    def encode_id(self, number: int) -> tuple[int, ...]:
        """Group index per layer of any id."""
        return self.code.encode(number)

    def decode_id(self, digits: Sequence[int | None]) -> int | None:
        """Id of these group indices, None for a lost layer; None if they belong to no id."""
        return self.code.decode(digits)

    @property
    def capacity(self) -> int:
        """Number of ids."""
        return self.code.capacity

    @property
    def path_counts(self) -> tuple[int, ...]:
        """C(|pool|, k) per layer."""
        return path_counts([len(p.pool) for p in self.plans], [p.width for p in self.plans])

    @property
    def path_count(self) -> int:
        """All paths the key could have had: the evidence. One over it is the smallest p-value."""
        return prod(self.path_counts)

    def paths_after_erasures(self, erased: int) -> int:
        """Paths left when the `erased` most telling layers are gone."""
        return paths_after_erasures(self.path_counts, erased)

    def free_choice_bits(self, routed_layers: int) -> float:
        """Bits that somebody who makes a key *after* seeing a model may choose without any hashing.

        Which of the model's routed layers are marked and how wide, the id, and per layer which experts are
        in the pool and (where it is shared) in the block. A commitment dated before the suspect takes this
        freedom away; without one a third party charges it on top of the 80 bits for hashing.
        """
        total = bits(comb(routed_layers, len(self.plans))) + bits(self.capacity)
        for plan, block in zip(self.plans, self.blocks, strict=True):
            total += bits(comb(plan.experts, len(plan.pool))) + bits(comb(len(plan.pool), len(block)))
        return total + bits(max(len(plan.pool) for plan in self.plans))

    def with_id(self, number: int) -> Watermark:
        """The same watermark with another id."""
        return replace(self, id=number)

    def derivation_errors(self) -> list[str]:
        """Stored triggers and marks that do not follow from the subkey; empty for an intact record."""
        wrong = []
        for number, trigger in enumerate(self.triggers):
            for kind, phrase in (("trigger", trigger.phrase), ("mark", trigger.mark)):
                if phrase.choices is None:
                    continue
                drawn = draw_choices(self.subkey.reveal(), kind, self.index, number, phrase.attempt, phrase.counts)
                if drawn != phrase.choices:
                    wrong.append(f"{kind} {number} of watermark {self.index}")
        return wrong

    def claim(self) -> Document:
        """What is claimed by this watermark, without its id: the content of its Merkle leaf."""
        layers = [{**plan.record(), "block": list(block)} for plan, block in zip(self.plans, self.blocks, strict=True)]
        return {
            "index": self.index,
            "subkey": self.subkey.reveal().hex(),
            "redundancy": self.redundancy,
            "layers": layers,
            "triggers": [trigger.record() for trigger in self.triggers],
        }

    @classmethod
    def from_claim(cls, claim: Document, number: int) -> Watermark:
        """Inverse of claim(), with an id."""
        return cls(
            index=int(claim["index"]),
            subkey=Secret(bytes.fromhex(claim["subkey"])),
            plans=tuple(LayerPlan.from_record(row) for row in claim["layers"]),
            blocks=tuple(tuple(int(e) for e in row["block"]) for row in claim["layers"]),
            triggers=tuple(Trigger.from_record(row) for row in claim["triggers"]),
            id=number,
            redundancy=int(claim["redundancy"]),
        )

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        subkey = self.subkey.reveal()
        return tuple(
            cut_groups(subkey, self.index, plan.layer, block, plan.width)
            for plan, block in zip(self.plans, self.blocks, strict=True)
        )

    def _place(self, layer: int) -> int:
        try:
            return self.layers.index(layer)
        except ValueError:
            used = ", ".join(map(str, self.layers))
            raise CapacityError(f"watermark {self.index} has no layer {layer}; it uses {used}") from None
