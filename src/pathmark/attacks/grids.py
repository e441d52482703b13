"""Integer grids for weights: round to nearest, GPTQ's solver, and the check that weights really lie on a grid.

A grid holds 2^bits values, scale * (q - zero), per group of consecutive inputs of a row. Weights stay floats that
take only those values ("fake" quantization): what a packed kernel would compute, on any machine.

Shape suffixes: O rows (outputs), I inputs, N groups, S inputs of a group; `...` any leading axes such as experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DAMP = 0.01
"""What GPTQ adds to the Hessian's diagonal, as a share of its mean."""
CHECKED = 1024
"""Groups of a tensor that `on_grid` looks at."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Scale and zero point of one or many groups: shapes (..., 1) beside values (..., S)."""

    scale: Tensor
    zero: Tensor
    top: int
    """The largest stored integer, 2^bits - 1."""

    def round(self, values: Tensor) -> Tensor:
        """Each value's nearest neighbour on the grid; what lies outside goes to its end."""
        stored = torch.round(values / self.scale + self.zero).clamp(0, self.top)
        return self.scale * (stored - self.zero)


def fit_grid(values: Tensor, bits: int, symmetric: bool) -> Grid:
    """The grid over the last axis. Zero is always on it; a symmetric one has its zero point fixed in the middle."""
    top = 2**bits - 1
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = (high - low) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a group of zeros stays one
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else torch.round(-low / scale)
    return Grid(scale, zero, top)


def round_to_grid(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    """Round-to-nearest along the last axis, in groups of `group_size` inputs (0: the whole row)."""
    grouped = in_groups(weight.float(), group_size)
    return fit_grid(grouped, bits, symmetric).round(grouped).reshape(weight.shape).to(weight.dtype)


def solve_gptq(weight_OI: Tensor, hessian_II: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    """Rows on a grid so that their outputs change little: GPTQ, Algorithm 1 of Frantar et al. (arXiv:2210.17323).

    `hessian_II` is the sum of x x^T over calibration inputs. Columns are rounded one by one, and what a rounding
    did to the outputs is made good by the columns still to come, by way of the inverse Hessian's Cholesky factor.
    """
    rest_OI, hessian_II = weight_OI.double().clone(), hessian_II.double().clone()
    inputs = rest_OI.shape[1]
    dead_I = hessian_II.diagonal() == 0
    hessian_II.diagonal()[dead_I] = 1  # an input that is always zero: any rounding will do
    hessian_II.diagonal().add_(DAMP * hessian_II.diagonal().mean())
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(hessian_II))
    factor_II = torch.linalg.cholesky(inverse_II, upper=True)
    size = group_size or inputs
    done_OI = torch.empty_like(rest_OI)
    for column in range(inputs):
        if column % size == 0:
            grid = fit_grid(rest_OI[:, column : column + size], bits, symmetric)
        done_OI[:, column] = grid.round(rest_OI[:, column : column + 1]).squeeze(1)
        error_O = (rest_OI[:, column] - done_OI[:, column]) / factor_II[column, column]
        rest_OI[:, column + 1 :] -= torch.outer(error_O, factor_II[column, column + 1 :])
    return done_OI.to(weight_OI.dtype)


def on_grid(weight: Tensor, bits: int, group_size: int) -> bool:
    """Whether groups take only values that are equally far apart, at most 2^bits of them from end to end.

    Ordinary floats do not, not even at 8 bits. Rounding of the floats themselves is allowed for, which leaves
    nothing to check at 8 bits in bfloat16. Of large tensors `CHECKED` groups are looked at, evenly spread.
    """
    groups_NS = in_groups(weight.detach(), group_size).flatten(0, -2)
    groups_NS = groups_NS[:: max(1, len(groups_NS) // CHECKED)].double()
    low_N1, high_N1 = groups_NS.amin(-1, keepdim=True), groups_NS.amax(-1, keepdim=True)
    places_NS = ((groups_NS - low_N1) / (high_N1 - low_N1))[(high_N1 > low_N1).squeeze(-1)]
    slack = 2 ** (bits + 1) * torch.finfo(weight.dtype).eps
    for steps in range(2**bits - 1, 0, -1):  # so many steps from the smallest value to the largest
        if not len(places_NS):
            break
        steps_NS = places_NS * steps
        places_NS = places_NS[((steps_NS - steps_NS.round()).abs() > slack).any(-1)]
    return not len(places_NS)


def in_groups(weight: Tensor, group_size: int) -> Tensor:
    """(..., N, S) from (..., I)."""
    return weight.reshape(*weight.shape[:-1], -1, group_size or weight.shape[-1])
