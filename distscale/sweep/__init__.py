"""One read over the local gradient shards; the only code that reads gradients in bulk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distscale.sweep.reference import INF_BITS as INF_BITS
from distscale.sweep.reference import amax_bits as amax_bits
from distscale.sweep.reference import scale_ as scale_
from distscale.sweep.reference import sum_of_squares as sum_of_squares

__all__ = ["INF_BITS", "Part", "amax_bits", "loss_bits", "scale_", "sum_of_squares", "sweep"]

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Part:
    """One shard to sweep."""

    values: Tensor
    """Dense, real, any floating dtype and device."""
    slot: int
    weight: float
    """1 / replicas: over all ranks, the weighted parts add up to one full gradient."""
    is_scaled: bool
    """Whether the values still carry the loss scale."""


def sweep(
    parts: Sequence[Part], num_slots: int, inv_scale: Tensor, want_norm: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Checks and measures every shard.

    Args:
        parts: at most one for each slot.
        num_slots: length of the slot table.
        inv_scale: float64, shape (): reciprocal of the scale that scaled parts carry.
        want_norm: whether to form the sum of squares.
        device: of the results.

    Returns:
        amax bits for each slot, int32, shape (num_slots,), of the unscaled values; a slot whose amax is finite now and
        would not be after unscaling, in its own dtype, reads as inf. And the weighted sum of squares of the unscaled
        values, float64, shape (1,), or None.

    Collective: no. Syncs host: no, if all parts are on ``device``.
    """
    slots = torch.zeros(num_slots, dtype=torch.int32, device=device)
    total = torch.zeros(1, dtype=torch.float64, device=device) if want_norm else None
    by_place: dict[tuple[torch.device, bool], list[Part]] = defaultdict(list)
    for part in parts:
        by_place[part.values.device, part.is_scaled].append(part)
    for (place, is_scaled), here in by_place.items():
        inv = inv_scale.to(place, non_blocking=True) if is_scaled else _constant((1.0,), torch.float64, place)[0]
        values = [part.values for part in here]
        bits = amax_bits(values)
        limits = _constant(tuple(_largest(part.values.dtype) for part in here), torch.float64, place)
        unscaled = bits.view(torch.float32).double() * inv
        finite = torch.where(unscaled > limits, INF_BITS, unscaled.clamp(max=_FLOAT32_MAX).float().view(torch.int32))
        # Where there is nothing to unscale, the bits stay as they are: arithmetic could flush a subnormal to zero.
        bits = torch.where((bits >= INF_BITS) | (inv == 1), bits, finite)
        index = _constant(tuple(part.slot for part in here), torch.int64, device)
        slots.index_copy_(0, index, bits.to(device, non_blocking=True))
        if total is not None:
            weights = _constant(tuple(part.weight for part in here), torch.float64, place)
            total += (torch.dot(weights, sum_of_squares(values)) * inv * inv).to(device, non_blocking=True)
    return slots, total


def loss_bits(loss: Tensor) -> Tensor:
    """Amax bits of a loss, int32, shape (), on its device; 0 for one that is not floating point. Syncs host: no."""
    local: Tensor = loss.to_local().detach() if isinstance(loss, DTensor) else loss.detach()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if not local.is_floating_point():
        return torch.zeros((), dtype=torch.int32, device=local.device)
    return amax_bits([local])[0]


def _largest(dtype: torch.dtype) -> float:
    """The largest magnitude that an unscaled value may have; amax is known up to float32's range only."""
    return min(torch.finfo(dtype).max, _FLOAT32_MAX) if dtype is not torch.float64 else float("inf")


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor that is the same at every step, so that it is copied to the device once."""
    return torch.tensor(values, dtype=dtype, device=device)
