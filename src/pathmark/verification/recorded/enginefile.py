"""Routes as the engines give them: vLLM's `routed_experts` arrays and SGLang's base64, turned into our recording.

A file of such answers is JSON lines `{"probe": id, "tokens": [...], "response": {...}}` with the engine's response as
it came; `tokens` may be left out where the response tells the prompt's tokens. What the engines don't say (how many
layers and experts there are, and which layers route) comes from the key's record of the owner's model.

Both return (tokens, layers, top-k); layers without a router are zeros (or, in some versions of vLLM, left out). The
span differs: prompt and generated tokens without the very last one, or the prompt alone, or from a given token on.
Generated tokens are cut off here.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.keys import ModelFacts
from pathmark.verification.recorded.routefile import (
    FORMAT,
    MAX_PROBES,
    RecordedProbe,
    Recording,
    RouteHeader,
    json_lines,
    read_array,
    read_own,
    require_size,
    whole_numbers,
)

_NPY = b"\x93NUMPY"


def read_routes(path: Path, facts: ModelFacts) -> Recording:
    """Recorded routes in any form that docs/routes.md describes; `facts` are those of the key's model."""
    require_size(path)
    with path.open("rb") as file:
        if file.read(1) not in b"{ \n":
            return read_own(path)
    first = next(json_lines(path), (0, None))[1]
    if not isinstance(first, dict) or "response" not in first or first.get("format") == FORMAT:
        return read_own(path)
    return _read_responses(path, facts)


def from_vllm(
    probe: str,
    tokens: Sequence[int],
    routed: NDArray[np.integer] | None,
    prompt_routed: NDArray[np.integer] | None = None,
) -> RecordedProbe:
    """Routes of a prompt from vLLM's arrays, all layers as they came.

    `prompt_routed` is `RequestOutput.prompt_routed_experts` of versions that have it; without it `routed`
    (`outputs[0].routed_experts`) covers prompt and generated tokens, without the last one.
    """
    source = routed if prompt_routed is None else prompt_routed
    where = f"probe {probe[:40]!r}"
    if source is None:
        raise VerificationError(f"{where}: vLLM returned no routes; start it with --enable-return-routed-experts")
    experts_TLK = whole_numbers(source, where, 3)[: len(tokens)]
    if len(experts_TLK) < len(tokens) - 1:
        raise VerificationError(
            f"{where}: routes of {len(experts_TLK)} tokens for a prompt of {len(tokens)}; are they of generated "
            "tokens only? Record prompt_routed_experts as well"
        )
    return RecordedProbe(probe, tuple(tokens), experts_TLK.astype(np.int32))


def from_sglang(
    probe: str,
    tokens: Sequence[int],
    encoded: str,
    *,
    num_layers: int,
    top_k: int,
    start: int = 0,
    generated: int | None = None,
) -> RecordedProbe:
    """Routes of a prompt from SGLang's base64 of int32, [tokens, layers, top-k] from token `start` on.

    `generated` is the number of completion tokens, where known: the rows must then be exactly those of
    [start, prompt + generated - 1), which catches a wrong number of layers or choices.
    """
    where = f"probe {probe[:40]!r}"
    raw = _decode(encoded, where)
    if raw.startswith(_NPY) or len(raw) % 4:
        raise VerificationError(f"{where}: expected base64 of int32, got {len(raw)} bytes of something else")
    flat = np.frombuffer(raw, dtype="<i4")
    rows, rest = divmod(flat.size, num_layers * top_k)
    expected = None if generated is None else len(tokens) + generated - 1 - start
    if rest or not rows or (expected is not None and rows != expected):
        raise VerificationError(
            f"{where}: {flat.size} numbers are no routes of {expected or 'some'} tokens in {num_layers} layers with "
            f"{top_k} experts each; if the suspect has another shape, write a {FORMAT} file (docs/routes.md)"
        )
    experts_TLK = flat.reshape(rows, num_layers, top_k)[: len(tokens) - start]
    return RecordedProbe(probe, tuple(tokens), experts_TLK.astype(np.int32), start)


def _read_responses(path: Path, facts: ModelFacts) -> Recording:
    probes: list[RecordedProbe] = []
    engines: set[str] = set()
    models: set[str] = set()
    for number, line in json_lines(path):
        where = f"{path}, line {number}"
        if not isinstance(line, dict) or not isinstance(line.get("response"), dict):
            raise VerificationError(f"{where}: expected an object with `probe` and `response`")
        if not isinstance(line.get("probe"), str):
            raise VerificationError(f"{where}: expected the id of a probe in `probe`")
        if len(probes) >= MAX_PROBES:
            raise VerificationError(f"{where}: more than {MAX_PROBES} probes")
        engine, probe = _read_response(line, facts, where)
        probes.append(probe)
        engines.add(engine)
        models.add(str(line["response"].get("model", ""))[:200])
    columns = {probe.experts_TLK.shape[1:] for probe in probes}
    if len(columns) != 1:
        raise VerificationError(f"{path}: answers with different numbers of layers or choices: {sorted(columns)}")
    layers, kept = _layers(next(iter(columns))[0], facts)
    header = RouteHeader(
        layers=layers,
        top_k=next(iter(columns))[1],
        n_experts=max(routed.experts for routed in facts.routed),
        model=", ".join(sorted(models)),
        engine=", ".join(sorted(engines)),
        obtained="responses of the engine as they came",
    )
    cut = [RecordedProbe(p.probe, p.tokens, p.experts_TLK[:, kept], p.start) for p in probes]
    return Recording(header, tuple(cut))


def _layers(columns: int, facts: ModelFacts) -> tuple[tuple[int, ...], list[int]]:
    """Routed layers of the owner's model, and which of the engine's columns they are."""
    routed = tuple(layer.layer for layer in facts.routed)
    if columns == facts.num_layers:
        return routed, list(routed)
    if columns == len(routed):
        return routed, list(range(columns))
    raise VerificationError(
        f"the engine recorded {columns} layers, the owner's model has {facts.num_layers} ({len(routed)} routed); "
        f"say which they are in a {FORMAT} file (docs/routes.md)"
    )


def _read_response(line: dict[str, Any], facts: ModelFacts, where: str) -> tuple[str, RecordedProbe]:
    """Engine and routes of one answer: SGLang's /generate or OpenAI-like endpoints, or vLLM's."""
    response, probe = line["response"], line["probe"]
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    meta = _object(response.get("meta_info"))
    places = [meta, *(_object(owner.get(name)) for owner in (choice, response) for name in ("sgl_ext", "sglext"))]
    holder = next((place for place in places if "routed_experts" in place), None)
    if holder is None:
        tokens = _tokens([line.get("tokens"), choice.get("prompt_token_ids"), response.get("prompt_token_ids")], where)
        routed, prompt = choice.get("routed_experts"), response.get("prompt_routed_experts")
        arrays = [None if value is None else _array(value, where) for value in (routed, prompt)]
        return "vllm", from_vllm(probe, tokens, arrays[0], arrays[1])
    if not isinstance(holder["routed_experts"], str):
        raise VerificationError(
            f"{where}: SGLang returned no routes; start it with --enable-return-routed-experts and ask for them with "
            "return_routed_experts"
        )
    seen = meta.get("input_token_logprobs")
    asked = [entry[1] for entry in seen] if isinstance(seen, list) and all(map(_is_logprob, seen)) else None
    tokens = _tokens([asked, line.get("tokens")], where)
    schema = _object(holder.get("expert_ids_schema"))
    generated = meta.get("completion_tokens", _object(response.get("usage")).get("completion_tokens"))
    sizes = {
        "num_layers": schema.get("num_layers", facts.num_layers),
        "top_k": schema.get("top_k", max(routed.top_k for routed in facts.routed)),
        "start": line.get("start", 0),
        "generated": generated,
    }
    if not all(type(size) is int and 0 <= size < 1 << 31 for name, size in sizes.items() if size is not None) or (
        not sizes["num_layers"] or not sizes["top_k"]
    ):
        raise VerificationError(f"{where}: layers, choices, start and completion tokens must be counts, got {sizes}")
    return "sglang", from_sglang(probe, tokens, holder["routed_experts"], **sizes)


def _tokens(known: Sequence[Any], where: str) -> tuple[int, ...]:
    """The prompt's tokens; where two sources tell them, they must agree."""
    told = [tuple(whole_numbers(tokens, f"{where}, tokens", 1).tolist()) for tokens in known if tokens is not None]
    if not told or not told[0]:
        raise VerificationError(f"{where}: the prompt's tokens are not told; add `tokens`, or ask the engine for them")
    if len(set(told)) > 1:
        raise VerificationError(f"{where}: the engine cut the prompt into other tokens than were sent")
    return told[0]


def _array(value: Any, where: str) -> NDArray[np.integer]:
    """Nested lists, or base64 of a `.npy` file."""
    if not isinstance(value, str):
        return whole_numbers(value, where, 3)
    raw = _decode(value, where)
    if not raw.startswith(_NPY):
        raise VerificationError(f"{where}: routed_experts is a text, but no base64 of an .npy array")
    try:
        return whole_numbers(read_array(io.BytesIO(raw), len(raw), where), where, 3)
    except (ValueError, EOFError) as error:
        if isinstance(error, VerificationError):
            raise
        raise VerificationError(f"{where}: routed_experts holds a damaged .npy array") from None


def _decode(encoded: str, where: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise VerificationError(f"{where}: routed_experts is no sound base64; was it cut off?") from None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_logprob(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) >= 2 and type(entry[1]) is int
