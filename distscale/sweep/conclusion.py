"""The end of a sweep: from what was found in the values of each part to what is true of the unscaled ones, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from distscale.sweep.parts import INF_BITS, Count, Part, Request, Swept

__all__ = ["conclude", "constant", "factors_of"]

_FLOAT32_MAX = torch.finfo(torch.float32).max


def conclude(parts: Sequence[Part], bits: Tensor, squares: Tensor | None, counts: Tensor, request: Request) -> Swept:
    """Ends a sweep: from what was found in the values, part by part, to what is true of the unscaled values.

    Args:
        parts: on one device.
        bits: int32, shape (len(parts),): amax bits of the values as they are.
        squares: float64, shape (len(parts),): sums of their squares; None if no norm is wanted.
        counts: int64, shape (len(parts), len(Count)).

    Collective: no. Syncs host: no.
    """
    place = bits.device
    factors = factors_of(parts, request)
    largest = constant(tuple(_largest(part) for part in parts), torch.float64, place)
    slot_of = constant(tuple(part.slot for part in parts), torch.int64, place)
    slots = torch.zeros(request.num_slots, dtype=torch.int32, device=place)
    slots.scatter_reduce_(0, slot_of, _unscaled_amax_bits(bits, factors, largest), "amax")
    sums = None
    if squares is not None:
        weights = constant(tuple(part.weight for part in parts), torch.float64, place)
        weighted = squares * weights * factors * factors
        if request.num_groups == 1:
            sums = weighted.sum(dim=0, keepdim=True)  # in the same order every time, on a device too
        else:
            group_of = constant(tuple(part.group for part in parts), torch.int64, place)
            sums = torch.zeros(request.num_groups, dtype=torch.float64, device=place)
            sums.scatter_add_(0, group_of, weighted)
    counts_of_slots = torch.zeros(request.num_slots, len(Count), dtype=torch.int64, device=place)
    return Swept(slots, sums, counts_of_slots.index_add_(0, slot_of, counts))


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor that is the same at every step, so that it is copied to the device once."""
    return torch.tensor(values, dtype=dtype, device=device)


def factors_of(parts: Sequence[Part], request: Request) -> Tensor:
    """What unscales the values: float64, shape (len(parts),)."""
    place = parts[0].values.device
    inv_scale = request.inv_scale.to(place, non_blocking=True)
    is_scaled = constant(tuple(part.is_scaled for part in parts), torch.bool, place)
    factors = torch.where(is_scaled, inv_scale, 1.0)
    if any(part.scale_inv is not None for part in parts):
        ones = torch.ones((), device=place)
        scale_invs = [ones if part.scale_inv is None else part.scale_inv.detach().view(()) for part in parts]
        factors = factors * torch.stack(scale_invs).double()
    return factors


def _largest(part: Part) -> float:
    """The largest magnitude that an unscaled value may have; amax is known up to float32's range only."""
    dtype = part.values.dtype if part.out is None else part.out.dtype
    if dtype is torch.float64:
        return float("inf")
    if part.out is None and part.scale_inv is not None:
        return _FLOAT32_MAX
    return min(torch.finfo(dtype).max, _FLOAT32_MAX)


def _unscaled_amax_bits(bits: Tensor, factors: Tensor, largest: Tensor) -> Tensor:
    """Bits of ``amax * factor``, rounded to nearest, or of inf if that is larger than ``largest``."""
    unscaled = bits.view(torch.float32).double() * factors
    unscaled = torch.where(unscaled <= largest, unscaled.clamp(max=_FLOAT32_MAX), torch.inf)
    return torch.where(bits >= INF_BITS, bits, unscaled.float().view(torch.int32))
