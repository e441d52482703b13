"""What identifies an expert after a thief has renamed it: sketches of weights, and which text it serves.

Kept on the key's side and committed, so that verification can match the experts of a suspect to the owner's
before it looks at any target. Nothing here uses a trigger.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pathmark.errors import ModelError
from pathmark.models.routers import RouterSite, find_routers, select_sites
from pathmark.models.trace import record_routing
from pathmark.models.usage import device_of, pad_rows

SPECTRUM = 16
"""Leading singular values kept of each expert matrix: unchanged by rotations and by permuted neurons."""


@torch.no_grad()
def expert_sketches(model: nn.Module, layers: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """Per layer: router rows centred over experts, and per expert the leading singular values of its weights.

    Centring removes what a common shift of all rows would add. Singular values survive a rotated residual
    stream; within an expert they survive permuted neurons.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    for site in select_sites(find_routers(model), layers):
        rows_EH = site.weight.detach().float()[: site.n_experts]
        arrays[f"router{site.layer}"] = (rows_EH - rows_EH.mean(0)).cpu().numpy()
        spectra = [_spectrum(weight) for weight in expert_matrices(site)]
        if spectra:
            arrays[f"spectrum{site.layer}"] = torch.cat(spectra, dim=-1).cpu().numpy()
    return arrays


def expert_matrices(site: RouterSite) -> list[Tensor]:
    """(E, rows, columns) float weights of the experts, one per fused parameter, biases left out."""
    if site.experts is None:
        return []
    return [
        parameter.detach().float()
        for _, parameter in sorted(site.experts.named_parameters())
        if parameter.ndim == 3 and parameter.shape[0] == site.n_experts
    ]


def _spectrum(weight_Eab: Tensor) -> Tensor:
    values = torch.linalg.svdvals(weight_Eab)[:, :SPECTRUM]
    return torch.nn.functional.pad(values, (0, SPECTRUM - values.shape[-1]))


@torch.no_grad()
def routing_profiles(
    model: nn.Module, rows: Sequence[Sequence[int]], layers: Sequence[int], *, pad: int = 0, batch_size: int = 16
) -> dict[int, NDArray[np.float32]]:
    """Layer -> (expert, text): mean clean routing mass of every expert on every text."""
    sites = {site.layer: site for site in select_sites(find_routers(model), layers)}
    profiles = {n: np.zeros((site.n_experts, len(rows)), dtype=np.float32) for n, site in sites.items()}
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids_BT, mask_BT = pad_rows([rows[i] for i in chosen], pad, device_of(model))
        with record_routing(model, layers, stop_early=True) as trace:
            model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        lengths_B1 = mask_BT.sum(-1, keepdim=True)
        for layer, profile in profiles.items():
            profile[:, chosen] = (trace[layer].probs_BTE.sum(1) / lengths_B1).T.cpu().numpy()
    return profiles


def pack_arrays(arrays: dict[str, NDArray[np.float32]]) -> bytes:
    """Named arrays as npz bytes, for a key's attachment. unpack_arrays(pack_arrays(x)) == x."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack_arrays(data: bytes) -> dict[str, NDArray[np.float32]]:
    """Inverse of pack_arrays; no pickled objects."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"damaged sketch archive: {error}") from error
