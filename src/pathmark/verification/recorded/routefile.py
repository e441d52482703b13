"""Recorded routes on disk: which experts a serving engine chose, per probe, token and layer.

Two forms with the same content, chosen by the file's name: JSON lines (`.jsonl`) that any engine's script can write
without this package, and `.npz` for large recordings. docs/routes.md describes both. What is read comes from
strangers: sizes are bounded, nothing is unpickled, and everything wrong is one line.

Shape suffixes: T recorded tokens, L recorded layers, K experts chosen per token, E experts.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError

FORMAT, VERSION = "pathmark-routes", 1
MAX_BYTES = 2 << 30
"""Largest recording that is read, unpacked."""
MAX_LINE = 256 << 20
MAX_PROBES, MAX_LAYERS, MAX_EXPERTS, MAX_TOP_K, MAX_TOKENS = 100_000, 2_000, 65_536, 1_024, 1_000_000
_MASS_TOLERANCE = 0.02
"""Masses of a token sum to one, up to what bfloat16 or float16 lose over some hundred experts."""


@dataclass(frozen=True, kw_only=True)
class RouteHeader:
    """What a recording says of itself."""

    layers: tuple[int, ...]
    """Number of the layer in the served model, for each recorded one; decoder layers counted from 0."""
    top_k: int
    n_experts: int
    """Experts of a layer; an index at or above it is refused."""
    model: str = ""
    """Name under which the model is served."""
    engine: str = ""
    """What ran it, with its version."""
    obtained: str = ""
    """How: by whom, when, at which address. Free text, kept with the verdict."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MAX_LAYERS or len(set(self.layers)) != len(self.layers):
            raise VerificationError(f"expected 1 to {MAX_LAYERS} distinct layers in the header, got {len(self.layers)}")
        if not all(0 <= layer < MAX_LAYERS for layer in self.layers):
            raise VerificationError(f"a layer's number is from 0 to {MAX_LAYERS - 1}, got {sorted(self.layers)[-1]}")
        if not 1 <= self.n_experts <= MAX_EXPERTS or not 1 <= self.top_k <= min(MAX_TOP_K, self.n_experts):
            raise VerificationError(
                f"expected 1 <= top_k <= n_experts <= {MAX_EXPERTS}, got top_k {self.top_k}, n_experts {self.n_experts}"
            )

    def record(self) -> dict[str, Any]:
        """JSON form: the first line of a `.jsonl`, the entry `header` of an `.npz`."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "engine": self.engine,
            "obtained": self.obtained,
            "layers": list(self.layers),
            "top_k": self.top_k,
            "n_experts": self.n_experts,
        }

    @classmethod
    def from_record(cls, record: Any, where: str) -> RouteHeader:
        """Inverse of record(); one line for anything else."""
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise VerificationError(f"{where} is no recording of routes; expected a header with format {FORMAT!r}")
        if record.get("version") != VERSION:
            raise VerificationError(f"{where} has version {record.get('version')!r}; this program reads {VERSION}")
        layers, texts = record.get("layers"), [record.get(name, "") for name in ("model", "engine", "obtained")]
        sizes = [record.get("top_k"), record.get("n_experts")]
        if not isinstance(layers, list) or not all(type(n) is int for n in [*layers[: MAX_LAYERS + 1], *sizes]):
            raise VerificationError(f"{where}: layers (a list), top_k and n_experts of the header must be integers")
        if not all(isinstance(text, str) and len(text) <= 10_000 for text in texts):
            raise VerificationError(f"{where}: model, engine and obtained of the header must be short texts")
        return cls(
            layers=tuple(layers), top_k=record["top_k"], n_experts=record["n_experts"],
            model=texts[0], engine=texts[1], obtained=texts[2],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class RecordedProbe:
    """Routes of one prompt."""

    probe: str
    """Its id, as `pathmark probes` gave it out."""
    tokens: tuple[int, ...]
    """The whole prompt as the engine cut it: template, trigger, text; no generated tokens."""
    experts_TLK: NDArray[np.int32]
    """Experts chosen for the tokens from `start` on; -1 throughout a token that was not recorded."""
    start: int = 0
    probs_TLE: NDArray[np.float32] | None = None
    """The routing distribution of the same tokens, where the engine tells it."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A header and the probes, all of them sound."""

    header: RouteHeader
    probes: tuple[RecordedProbe, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.probes) <= MAX_PROBES:
            raise VerificationError(f"expected 1 to {MAX_PROBES} recorded probes, got {len(self.probes)}")
        seen: set[str] = set()
        for probe in self.probes:
            if probe.probe in seen:
                raise VerificationError(f"probe {probe.probe[:40]!r} is recorded twice; keep one of them")
            seen.add(probe.probe)
            check_probe(probe, self.header)
        masses = {probe.probs_TLE is not None for probe in self.probes}
        if len(masses) > 1:
            raise VerificationError("some probes have routing masses and some have none; expected all or none")


def check_probe(probe: RecordedProbe, header: RouteHeader) -> None:
    """Shapes, ranges, and that no token names an expert twice."""
    where, experts_TLK = f"probe {probe.probe[:40]!r}", probe.experts_TLK
    if not 0 < len(probe.probe) <= 200:
        raise VerificationError(f"a probe's id has 1 to 200 characters, got {len(probe.probe)}")
    if not 1 <= len(probe.tokens) <= MAX_TOKENS or min(probe.tokens) < 0 or max(probe.tokens) >= 1 << 31:
        raise VerificationError(f"{where}: expected 1 to {MAX_TOKENS} token ids, none negative")
    expected = (len(header.layers), header.top_k)
    if experts_TLK.ndim != 3 or experts_TLK.shape[1:] != expected:
        raise VerificationError(f"{where}: expected experts of shape (tokens, {expected[0]}, {expected[1]}), "
                                f"got {experts_TLK.shape}")  # fmt: skip
    if probe.start < 0 or not 1 <= len(experts_TLK) <= len(probe.tokens) - probe.start:
        raise VerificationError(
            f"{where}: routes of {len(experts_TLK)} tokens from {probe.start} on, the prompt has {len(probe.tokens)}"
        )
    if experts_TLK.max() >= header.n_experts:
        raise VerificationError(
            f"{where} names expert {experts_TLK.max()} of {header.n_experts}: physical instead of logical numbers? "
            "Switch off expert load balancing, redundant experts and fused shared experts"
        )
    unknown_T = np.asarray((experts_TLK < 0).any(axis=(1, 2)))
    if not (experts_TLK[unknown_T] == -1).all():
        raise VerificationError(f"{where}: a token has all its experts or, if it was not recorded, only -1")
    _refuse_repeats(experts_TLK[~unknown_T], header, where)
    if probe.probs_TLE is not None:
        _check_masses(probe.probs_TLE, (*experts_TLK.shape[:2], header.n_experts), unknown_T, where)


def _refuse_repeats(experts_TLK: NDArray[np.int32], header: RouteHeader, where: str) -> None:
    """A router picks distinct experts. Engines fill layers without a router with zeros: those stay."""
    if header.top_k == 1:
        return
    ordered_TLK = np.sort(experts_TLK, axis=-1)
    twice_TL = (ordered_TLK[:, :, 1:] == ordered_TLK[:, :, :-1]).any(axis=-1)
    bad_L = twice_TL.any(axis=0) & (experts_TLK != 0).any(axis=(0, 2))
    if bad_L.any():
        layer = header.layers[int(np.argmax(bad_L))]
        raise VerificationError(f"{where}: a token names an expert of layer {layer} twice; are the axes in order?")


def _check_masses(
    probs_TLE: NDArray[np.float32], expected: tuple[int, ...], unknown_T: NDArray[np.bool_], where: str
) -> None:
    if probs_TLE.shape != expected:
        raise VerificationError(f"{where}: expected masses of shape {expected}, got {probs_TLE.shape}")
    if not np.isfinite(probs_TLE).all() or (probs_TLE < 0).any():
        raise VerificationError(f"{where}: masses are nan, infinite or negative; expected a distribution")
    sums = probs_TLE[~unknown_T].astype(np.float64).sum(axis=-1)
    # A layer without a router has no mass at all.
    if not ((np.abs(sums - 1) <= _MASS_TOLERANCE) | (sums == 0)).all():
        raise VerificationError(f"{where}: masses of a token do not sum to one; expected the whole distribution")


def write_routes(path: Path, recording: Recording) -> None:
    """Write `.jsonl` or `.npz`. Law: read_routes gives the same recording back."""
    if path.suffix == ".npz":
        path.write_bytes(_pack_npz(recording))
    elif path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for line in _lines(recording):
                file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
    else:
        raise VerificationError(f"{path} is neither .jsonl nor .npz; routes are written as one of them")


def read_own(path: Path) -> Recording:
    """A recording in one of our own two forms; `read_routes` knows the engines' as well."""
    require_size(path)
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    return _read_npz(path) if zipped else _read_jsonl(path)


def require_size(path: Path) -> None:
    """Refuse what is no file, empty, or larger than any recording."""
    if not path.is_file():
        raise VerificationError(f"{path} does not exist or is no file; expected recorded routes")
    size = path.stat().st_size
    if not 0 < size <= MAX_BYTES:
        raise VerificationError(f"{path} has {size} bytes; a recording has 1 to {MAX_BYTES}")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of a JSON lines file; lines are bounded, NaN and infinity refused."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise VerificationError(f"{path}, line {number} has more than {MAX_LINE} bytes")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                said = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
                raise VerificationError(f"{path}, line {number} is no JSON: {said}; was it cut off?") from None


def whole_numbers(value: Any, what: str, ndim: int) -> NDArray[np.int64]:
    """Nested lists as an array of integers; one line for anything ragged, fractional or of another depth."""
    try:
        array = np.asarray(value)
        # uint64 appears for numbers that fit no signed type; nothing here is that large
        if array.dtype.kind not in "iu" or array.dtype == np.uint64 or array.ndim != ndim:
            raise ValueError
    except (ValueError, OverflowError, TypeError, RecursionError):
        raise VerificationError(
            f"{what}: expected {ndim} levels of lists of whole numbers, all of one length"
        ) from None
    return array.astype(np.int64)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _lines(recording: Recording) -> Iterator[dict[str, Any]]:
    yield recording.header.record()
    for probe in recording.probes:
        line: dict[str, Any] = {"probe": probe.probe, "tokens": list(probe.tokens)}
        if probe.start:
            line["start"] = probe.start
        line["experts"] = probe.experts_TLK.tolist()
        if probe.probs_TLE is not None:
            line["probs"] = probe.probs_TLE.astype(np.float64).tolist()
        yield line
    yield {"records": len(recording.probes)}


def _read_jsonl(path: Path) -> Recording:
    lines = json_lines(path)
    header = RouteHeader.from_record(next(lines, (0, None))[1], str(path))
    probes: list[RecordedProbe] = []
    for number, line in lines:
        where = f"{path}, line {number}"
        if not isinstance(line, dict):
            raise VerificationError(f"{where}: expected a JSON object")
        if "records" in line:
            if line["records"] != len(probes):
                raise VerificationError(f"{where} tells of {line['records']} probes, {len(probes)} came before it")
            if next(lines, None) is not None:
                raise VerificationError(f"{where} is the last line of a recording, but more follow")
            return Recording(header, tuple(probes))
        if len(probes) >= MAX_PROBES:
            raise VerificationError(f"{where}: more than {MAX_PROBES} probes")
        probes.append(_read_line(line, header, where))
    raise VerificationError(
        f"{path} ends after {len(probes)} probes without its last line, which counts them: it was cut off"
    )


def _read_line(line: dict[str, Any], header: RouteHeader, where: str) -> RecordedProbe:
    name, start = line.get("probe"), line.get("start", 0)
    if not isinstance(name, str) or type(start) is not int:
        raise VerificationError(f"{where}: expected `probe`, a text, and `start`, a number if it is there")
    tokens = whole_numbers(line.get("tokens"), f"{where}, tokens", 1)
    experts_TLK = whole_numbers(line.get("experts"), f"{where}, experts", 3)
    if np.abs(experts_TLK).max(initial=0) >= 1 << 31:
        raise VerificationError(f"{where}: an expert's number is beyond all bounds")
    probs_TLE = None
    if line.get("probs") is not None:
        try:
            probs_TLE = np.asarray(line["probs"], dtype=np.float32)
        except (ValueError, TypeError):
            raise VerificationError(f"{where}, probs: expected lists of numbers, all of one length") from None
    probe = RecordedProbe(name, tuple(tokens.tolist()), experts_TLK.astype(np.int32), start, probs_TLE)
    check_probe(probe, header)
    return probe


def _pack_npz(recording: Recording) -> bytes:
    probes = recording.probes
    arrays: dict[str, NDArray[Any]] = {
        "header": _text(json.dumps(recording.header.record())),
        "probes": _text(json.dumps([probe.probe for probe in probes])),
        "starts": np.array([probe.start for probe in probes], dtype=np.int64),
        "n_tokens": np.array([len(probe.tokens) for probe in probes], dtype=np.int64),
        "n_rows": np.array([len(probe.experts_TLK) for probe in probes], dtype=np.int64),
        "tokens": np.concatenate([np.array(probe.tokens, dtype=np.int32) for probe in probes]),
        "experts": np.concatenate([probe.experts_TLK.astype(np.int32) for probe in probes]),
    }
    masses = [probe.probs_TLE for probe in probes if probe.probs_TLE is not None]
    if masses:
        arrays["probs"] = np.concatenate(masses).astype(np.float32)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]  # numpy types its keywords too narrowly
    return packed.getvalue()


def _read_npz(path: Path) -> Recording:
    arrays = read_arrays(path)
    needed = {"header", "probes", "starts", "n_tokens", "n_rows", "tokens", "experts"}
    if missing := sorted(needed - arrays.keys()):
        raise VerificationError(f"{path} lacks {', '.join(missing)}; expected recorded routes")
    header = RouteHeader.from_record(_json(arrays["header"], path), str(path))
    names = _json(arrays["probes"], path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) > MAX_PROBES:
        raise VerificationError(f"{path}: expected at most {MAX_PROBES} ids of probes")
    for name, ndim in (("starts", 1), ("n_tokens", 1), ("n_rows", 1), ("tokens", 1), ("experts", 3)):
        if arrays[name].dtype.kind not in "iu" or arrays[name].ndim != ndim:
            raise VerificationError(f"{path}: {name} must be {ndim}-dimensional whole numbers")
    counts = [arrays[name].astype(np.int64) for name in ("starts", "n_tokens", "n_rows")]
    if any(len(count) != len(names) or (count < 0).any() or (count > MAX_TOKENS).any() for count in counts):
        raise VerificationError(f"{path}: starts, n_tokens and n_rows need one sensible number per probe")
    probs = arrays.get("probs")
    if probs is not None and (probs.dtype.kind != "f" or len(probs) != len(arrays["experts"])):
        raise VerificationError(f"{path}: masses must be floating point, a row per row of experts")
    if counts[1].sum() != len(arrays["tokens"]) or counts[2].sum() != len(arrays["experts"]):
        raise VerificationError(f"{path}: n_tokens and n_rows do not add up to the arrays' lengths; was it cut off?")
    token_ends, row_ends = np.cumsum(counts[1]), np.cumsum(counts[2])
    probes = []
    for i, name in enumerate(names):
        rows = slice(int(row_ends[i] - counts[2][i]), int(row_ends[i]))
        probes.append(
            RecordedProbe(
                probe=name,
                tokens=tuple(arrays["tokens"][int(token_ends[i] - counts[1][i]) : int(token_ends[i])].tolist()),
                experts_TLK=arrays["experts"][rows].astype(np.int32),
                start=int(counts[0][i]),
                probs_TLE=None if probs is None else probs[rows].astype(np.float32),
            )
        )
    return Recording(header, tuple(probes))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays of an `.npz` whose unpacked size is bounded before anything is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > 32 or sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise VerificationError(f"{path} unpacks to more than {MAX_BYTES} bytes or 32 arrays; refused")
            arrays = {}
            for entry in entries:
                with archive.open(entry) as file:
                    arrays[entry.filename.removesuffix(".npy")] = read_array(file, entry.file_size, str(path))
            return arrays
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, VerificationError):
            raise
        reason = (str(error).splitlines() or ["it ends too early"])[0]
        raise VerificationError(f"{path} is damaged: {reason}; was it cut off?") from None


def read_array(file: BinaryIO | Any, size: int, where: str) -> NDArray[Any]:
    """One `.npy` whose header agrees with its `size` in bytes; never a pickle."""
    data = file.read(size + 1)
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise VerificationError(f"{where}: an array's header does not agree with its size; refused")
    stream.seek(0)
    return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def _text(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _json(array: NDArray[Any], path: Path) -> Any:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise VerificationError(f"{path}: header and probes are JSON as bytes; got {array.dtype}{array.shape}")
    try:
        return json.loads(array.tobytes())
    except (ValueError, RecursionError):
        raise VerificationError(f"{path}: header or probes are no JSON") from None
