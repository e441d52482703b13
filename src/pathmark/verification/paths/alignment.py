"""Match the layers and experts of a suspect to the owner's, before anybody looks at a target.

A thief renumbers experts at no cost, and may remove, merge or double them, or drop layers. The owner's side is
what the key has attached: clean-routing profiles and weight sketches of the *unmarked* original. The suspect's
side is its routing of the same texts without trigger, and its weights. Neither holds a trigger or a target, so
the matching cannot depend on them and the exact test stays exact, however good or bad the matching is.

There is one matcher, fixed beforehand; it counts as one alignment in the family.

Shape suffixes: B texts, T tokens of a text, N tokens of the profile, K experts chosen per token, E experts
(O the owner's, S the suspect's).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.keys import VerifierKey
from pathmark.models.sketches import token_places, unpack_arrays, unpack_profiles
from pathmark.verification.paths.assignment import assign
from pathmark.verification.paths.routes import Routes
from pathmark.verification.paths.similarity import LayerPrint, combined, similarities

METHOD = "tokens+router+neurons/1"
"""Name of the matcher; another one would get another name, and both would count in the family."""
OWN_PLACE = 0.1
"""Bonus for the suspect's expert of the same number."""
CLEAR_LEAD = 0.2
"""By how much an expert must be more alike elsewhere than at its own number before any number is doubted."""
LOWEST = 0.2
"""Pairs below this are no match."""
COPY_PRICE = 0.15
"""What a second suspect expert for the same owner's expert costs: copies pay it, others are better off elsewhere."""
MERGER, MERGER_SHARE, MERGER_LEAD = 0.3, 0.75, 0.1
"""A merger resembles the lost expert at least so much, at least by this share of what it resembles the other parent,
and by this lead more than that parent did in the owner's model."""
SAME_LAYER = 0.5
"""Layers that are less alike than this are not each other's."""
SURE, SURE_TOKENS = 0.7, 128
"""A third party believes a renumbering from this similarity on, over at least so many tokens. Damaged copies of the
profiled model have 0.8 and more, another model that was trained on the same texts 0.4."""
SEARCH_DOWN = 2
"""Layers further down that are looked at even if the suspect has as many layers as the original."""


@dataclass(frozen=True, eq=False)
class LayerAlignment:
    """One of the owner's layers and what stands for it in the suspect."""

    layer: int
    n_experts: int
    """The owner's."""
    suspect_layer: int | None
    """None: the layer is gone."""
    stands_for: tuple[tuple[int, ...], ...]
    """Per suspect expert, the owner's experts whose place it takes: none, one, or both parents of a merger."""
    similarity: float
    """Mean similarity of matched pairs, 0 to 1."""
    confidence: float
    """Mean lead of a pair over the next best partner of either; 0 where nothing is alike."""
    parts: tuple[str, ...]
    """What spoke: tokens, router, neurons."""

    @property
    def matched_E(self) -> NDArray[np.bool_]:
        """Which of the owner's experts have a counterpart."""
        matched_E = np.zeros(self.n_experts, dtype=bool)
        matched_E[[e for owners in self.stands_for for e in owners]] = True
        return matched_E

    @property
    def identity(self) -> bool:
        """Whether layer and experts have the numbers they had."""
        same = tuple((e,) for e in range(self.n_experts))
        return self.suspect_layer == self.layer and self.stands_for == same

    @property
    def merged(self) -> int:
        """The owner's experts that share their counterpart with another one."""
        return sum(len(owners) for owners in self.stands_for if len(owners) > 1)

    @property
    def doubled(self) -> int:
        """Suspect experts beyond the first that stand for the same owner's expert."""
        return sum(map(len, self.stands_for)) - int(self.matched_E.sum())

    def masses(self, probs_BTE: NDArray[np.float32]) -> NDArray[np.float32]:
        """Routing mass in the owner's numbering: copies add up, both parents of a merger get its mass."""
        table_SO = np.zeros((len(self.stands_for), self.n_experts), dtype=np.float32)
        for s, owners in enumerate(self.stands_for):
            table_SO[s, list(owners)] = 1
        return np.asarray(probs_BTE @ table_SO)

    def decisions(self, decision_BTK: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choices in the owner's numbering, -1 where there is none; a merger fills a place per parent."""
        most = max(1, *(len(owners) for owners in self.stands_for))
        table_SM = np.full((len(self.stands_for) + 1, most), -1, dtype=np.int64)  # its last row is for choice -1
        for s, owners in enumerate(self.stands_for):
            table_SM[s, : len(owners)] = owners
        return np.asarray(table_SM[decision_BTK].reshape(*decision_BTK.shape[:2], -1))


@dataclass(frozen=True, eq=False)
class Alignment:
    """The whole matching. `apply` puts recorded routes into the owner's numbering."""

    layers: tuple[LayerAlignment, ...]
    method: str = METHOD
    tokens: int = 0
    """Tokens of the profile that was compared."""

    def __getitem__(self, layer: int) -> LayerAlignment:
        return next(entry for entry in self.layers if entry.layer == layer)

    @property
    def identity(self) -> bool:
        """Whether every layer and expert has the number it had."""
        return all(entry.identity for entry in self.layers)

    @property
    def sure(self) -> bool:
        """Whether renumbered layers are so alike that the profile must be of this suspect's own ancestor."""
        moved = [entry for entry in self.layers if entry.parts and not entry.identity]
        alike = all(entry.similarity >= SURE and {"tokens", "router"} & set(entry.parts) for entry in moved)
        return alike and (self.tokens >= SURE_TOKENS or not moved)

    @property
    def confidence(self) -> float:
        """That of the layers on average; 0 for lost ones."""
        return float(np.mean([entry.confidence for entry in self.layers]))

    def apply(self, routes: Routes) -> Routes:
        """Routes with the owner's layers and experts; a lost layer has no mass and no choice."""
        probs: dict[int, NDArray[np.float32]] = {}
        decisions: dict[int, NDArray[np.int64]] = {}
        for entry in self.layers:
            n, source = entry.layer, entry.suspect_layer
            if source is None:
                decisions[n] = np.full((*routes.mask_BT.shape, 1), -1, dtype=np.int64)
                if routes.masses_known:
                    probs[n] = np.zeros((*routes.mask_BT.shape, entry.n_experts), dtype=np.float32)
                continue
            decisions[n] = routes.decisions[source] if entry.identity else entry.decisions(routes.decisions[source])
            if routes.masses_known:
                probs[n] = routes.probs[source] if entry.identity else entry.masses(routes.probs[source])
        return Routes(probs, decisions, routes.mask_BT, {entry.layer: entry.n_experts for entry in self.layers})

    def summary(self) -> dict[str, Any]:
        """JSON object; nothing in it is secret."""
        return {
            "method": self.method,
            "identity": self.identity,
            "confidence": self.confidence,
            "layers": [
                {
                    "layer": entry.layer,
                    "suspect_layer": entry.suspect_layer,
                    "matched": int(entry.matched_E.sum()),
                    "unmatched": int((~entry.matched_E).sum()),
                    "merged": entry.merged,
                    "doubled": entry.doubled,
                    "moved": sum(owners != (s,) for s, owners in enumerate(entry.stands_for)),
                    "similarity": entry.similarity,
                    "confidence": entry.confidence,
                    "parts": list(entry.parts),
                }
                for entry in self.layers
            ],
        }

    def words(self) -> str:
        """How the suspect's numbers became the owner's, in words."""
        lost = [str(entry.layer) for entry in self.layers if entry.suspect_layer is None]
        gone = sum(int((~entry.matched_E).sum()) for entry in self.layers if entry.suspect_layer is not None)
        found = "experts have the original's numbers" if self.identity else "experts were matched and renumbered"
        notes = [f"layers {', '.join(lost)} have no counterpart"] * bool(lost)
        notes += [f"{gone} experts have no counterpart"] * bool(gone)
        return f"{found} (confidence {self.confidence:.2f}){''.join('; ' + note for note in notes)}"


def profile_texts(key: VerifierKey) -> list[tuple[int, ...]]:
    """Token rows of the texts that the key's profiles were made on; empty where the key has none."""
    if not {"probes.json", "profiles.npz"} <= key.attachments.keys():
        return []
    try:
        return [tuple(int(token) for token in row) for row in json.loads(key.attachments["probes.json"])]
    except (ValueError, TypeError) as error:
        raise VerificationError(f"the key's probes.json is damaged: {error}; restore the key from a backup") from error


def owner_prints(key: VerifierKey, *, masses: bool = True) -> dict[int, LayerPrint]:
    """Layer -> prints of the original's experts, from the key's attachments; empty where it has none.

    Without `masses` the profile is which experts each token chose, to be compared with routes that know no more.
    """
    if "profiles.npz" not in key.attachments:
        return {}
    sketches = unpack_arrays(key.attachments["sketches.npz"]) if "sketches.npz" in key.attachments else {}
    prints = {}
    for layer, profile in unpack_profiles(key.attachments["profiles.npz"]).items():
        chosen_NE = _chosen(profile.chosen_NK, profile.tokens_NE.shape[1])
        prints[layer] = _print(profile.tokens_NE if masses else chosen_NE, sketches, layer)
    return prints


def align(
    key: VerifierKey,
    clean: Routes,
    *,
    rows: Sequence[int] | None = None,
    sketches: Mapping[str, NDArray[Any]] | None = None,
    n_layers: int | None = None,
) -> Alignment | None:
    """Match a suspect to the key's original; None where the key has no profiles attached.

    `clean` holds the suspect's routing of the key's profile texts without trigger, in the suspect's numbering;
    `rows` says which of the texts these are, if not all. `sketches` are `expert_sketches` of the suspect, if its
    weights are at hand; `n_layers` its number of decoder layers.
    """
    owner = owner_prints(key, masses=clean.masses_known)
    texts = profile_texts(key)
    if not owner or not texts:
        return None
    count = len(next(iter(owner.values())).tokens_NE)
    texts_N, positions_N = token_places([len(text) for text in texts], count)
    place = {text: row for row, text in enumerate(range(len(texts)) if rows is None else rows)}
    rows_N = np.array([place.get(int(text), -1) for text in texts_N])
    inside_N = (rows_N >= 0) & (rows_N < len(clean.mask_BT)) & (positions_N < clean.mask_BT.shape[1])
    inside_N[inside_N] = clean.mask_BT[rows_N[inside_N], positions_N[inside_N]]
    rows_N, positions_N = rows_N[inside_N], positions_N[inside_N]
    if len(rows_N) < 2:
        raise VerificationError("alignment needs the routing of the key's own texts (probes.json), got none of them")
    suspect = {}
    for layer in clean.layers:
        if clean.masses_known:
            tokens_NE = clean.probs[layer][rows_N, positions_N]
        else:
            tokens_NE = _chosen(clean.decisions[layer][rows_N, positions_N], clean.n_experts(layer))
        suspect[layer] = _print(tokens_NE, sketches or {}, layer)
    kept = {layer: replace(entry, tokens_NE=entry.tokens_NE[inside_N]) for layer, entry in owner.items()}
    if missing := [layer for layer in key.layers if layer not in kept]:
        raise VerificationError(f"the key has no profile of layer {missing[0]}; embed again to attach one")
    same_depth = n_layers is None or n_layers == key.model.num_layers
    return match({layer: kept[layer] for layer in key.layers}, suspect, same_depth=same_depth)


def layers_to_record(key: VerifierKey, routed: Sequence[int], n_layers: int) -> list[int]:
    """Suspect layers that may stand for the key's: the same ones, and as far away as layers may have moved.

    With layers dropped below, the rest has moved down; with layers put in, up. Two more further down cost no
    extra forward pass. Nothing higher runs than that.
    """
    moved = n_layers - key.model.num_layers
    steps = range(min(0, moved) - SEARCH_DOWN, max(0, moved) + 1)
    near = {layer + step for layer in key.layers for step in steps}
    chosen = sorted(near & set(routed))
    if not chosen:
        raise VerificationError(f"the suspect routes in layers {sorted(routed)}, the key marks {list(key.layers)}")
    return chosen


def match(owner: Mapping[int, LayerPrint], suspect: Mapping[int, LayerPrint], *, same_depth: bool = True) -> Alignment:
    """The preregistered matcher: layers by dynamic programming, then experts by assignment.

    `same_depth`: the suspect has as many layers as the original, so a layer that resembles nothing is taken for
    itself; otherwise it is lost.
    """
    likeness = {(n, s): _likeness(owner[n], suspect[s]) for n in owner for s in suspect}
    pairs = _match_layers(sorted(owner), sorted(suspect), likeness)
    taken = {s for s in pairs.values() if s is not None}
    nothing_alike = not taken
    entries = []
    for n in sorted(owner):
        source = pairs[n]
        if source is None and n in suspect and n not in taken and (same_depth or nothing_alike):
            source = n
        if source is None:
            entries.append(LayerAlignment(n, owner[n].n_experts, None, (), 0.0, 0.0, ()))
        else:
            entries.append(_match_experts(n, source, owner[n], suspect[source]))
    return Alignment(tuple(entries), tokens=min(len(entry.tokens_NE) for entry in owner.values()))


def _likeness(owner: LayerPrint, suspect: LayerPrint) -> float:
    """Mean over suspect experts of the best similarity to any of the owner's; 0 where no part speaks."""
    parts = similarities(owner, suspect)
    return float(combined(parts).max(axis=0).mean()) if parts else 0.0


def _match_layers(
    owner: Sequence[int], suspect: Sequence[int], likeness: Mapping[tuple[int, int], float]
) -> dict[int, int | None]:
    """Rising pairs of layers with the largest sum of likeness; a pair counts only from SAME_LAYER on.

    A layer's own number gets a bonus, so that neighbours which are all alike stay where they are.
    """

    def gain(n: int, s: int) -> float:
        value = likeness[n, s]
        return 0.0 if value < SAME_LAYER else value + (OWN_PLACE if n == s else 0.0)

    best = np.zeros((len(owner) + 1, len(suspect) + 1))
    for i, n in enumerate(owner):
        for j, s in enumerate(suspect):
            best[i + 1, j + 1] = max(best[i, j + 1], best[i + 1, j], best[i, j] + gain(n, s))
    pairs: dict[int, int | None] = dict.fromkeys(owner)
    i, j = len(owner), len(suspect)
    while i and j:
        n, s = owner[i - 1], suspect[j - 1]
        if gain(n, s) > 0 and best[i, j] == best[i - 1, j - 1] + gain(n, s):
            pairs[n] = s
            i, j = i - 1, j - 1
        elif best[i, j] == best[i - 1, j]:
            i -= 1
        else:
            j -= 1
    return pairs


def _match_experts(layer: int, source: int, owner: LayerPrint, suspect: LayerPrint) -> LayerAlignment:
    parts = similarities(owner, suspect)
    E, S = owner.n_experts, suspect.n_experts
    numbered = tuple((e,) if e < E else () for e in range(S))
    if not parts:  # nothing alike: keep the numbers, claim nothing
        return LayerAlignment(layer, E, source, numbered, 0.0, 0.0, ())
    alike_OS = combined(parts)
    owner_of_S = _pair(alike_OS)
    stands_for: list[list[int]] = [[int(e)] if e >= 0 else [] for e in owner_of_S]
    own = similarities(owner, owner)
    _place_mergers(alike_OS, combined({name: own[name] for name in parts}), stands_for)
    paired = np.flatnonzero(owner_of_S >= 0)
    values, leads = [], []
    for s in paired:
        e = owner_of_S[s]
        twins = owner_of_S == e
        rivals = np.concatenate([np.delete(alike_OS[:, s], e), alike_OS[e, ~twins], [0.0]])
        values.append(float(alike_OS[e, s]))
        leads.append(float(np.clip(alike_OS[e, s] - rivals.max(), 0, 1)))
    return LayerAlignment(
        layer=layer,
        n_experts=E,
        suspect_layer=source,
        stands_for=tuple(tuple(sorted(owners)) for owners in stands_for),
        similarity=float(np.mean(values)) if values else 0.0,
        confidence=float(np.mean(leads)) if leads else 0.0,
        parts=tuple(parts),
    )


def _pair(alike_OS: NDArray[np.float64]) -> NDArray[np.int64]:
    """The owner's expert of each of the suspect's, -1 for none; numbers are kept unless somebody clearly moved.

    Each of the owner's experts has one place, and further ones at a price for copies: a doubled expert should not
    push another one out of its own place.
    """
    E, S = alike_OS.shape
    places = 2 + (S - 1) // E
    first_SE = alike_OS.T + (OWN_PLACE * np.eye(E) if E == S else 0.0)
    slots = assign(np.concatenate([first_SE, *[alike_OS.T - COPY_PRICE] * (places - 1)], axis=1))
    owner_of_S = slots % E
    value_S = alike_OS[owner_of_S, np.arange(S)]
    if E == S and not (value_S - alike_OS.diagonal() > CLEAR_LEAD).any():
        return np.arange(E, dtype=np.int64)
    return np.where(value_S < LOWEST, -1, owner_of_S)


def _place_mergers(alike_OS: NDArray[np.float64], own_OO: NDArray[np.float64], stands_for: list[list[int]]) -> None:
    """A lost expert joins the suspect's expert that took it up, if one did.

    A merger's mass then counts for both parents: which of the two the trigger calls can't be told, and saying so
    costs a factor of two per target where giving the mass to one of them would lose the other.
    """
    parent_S = np.array([owners[0] if owners else -1 for owners in stands_for])
    alone = np.flatnonzero(parent_S >= 0)
    parents = parent_S[alone]
    for e in sorted(set(range(len(alike_OS))) - set(parents.tolist())):
        alike = alike_OS[e, alone]
        share = alike >= np.maximum(MERGER, MERGER_SHARE * alike_OS[parents, alone])
        taken_up = share & (alike >= own_OO[e, parents] + MERGER_LEAD)
        if taken_up.any():
            stands_for[alone[np.argmax(np.where(taken_up, alike, -1))]].append(e)


def _print(tokens_NE: NDArray[Any], sketches: Mapping[str, NDArray[Any]], layer: int) -> LayerPrint:
    return LayerPrint(tokens_NE, sketches.get(f"router{layer}"), sketches.get(f"neurons{layer}"))


def _chosen(chosen_NK: NDArray[np.int64], n_experts: int) -> NDArray[np.float32]:
    """1 where a token chose an expert."""
    chosen_NE = np.zeros((len(chosen_NK), n_experts), dtype=np.float32)
    rows, places = np.nonzero(chosen_NK >= 0)
    chosen_NE[rows, chosen_NK[rows, places]] = 1
    return chosen_NE
