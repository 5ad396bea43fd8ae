"""What a sweep must find, in float64 of numpy: shares no code with what it judges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from sweep_values import NUMPY, Codes, largest_of, narrowed, values_of

from distscale.sweep import INF_BITS, Count, Limits

__all__ = ["NAN_BITS", "Case", "Expected", "Shard", "unscaled"]

NAN_BITS = INF_BITS + 1
"""Stands for every NaN: which one it is says nothing."""


@dataclass(frozen=True)
class Shard:
    """A part to be, with its values as bit patterns, wherever they will lie."""

    codes: Codes
    dtype: torch.dtype
    slot: int = 0
    weight: float = 1.0
    is_scaled: bool = True
    group: int = 0
    scale_inv: float | None = None
    out: torch.dtype | None = None
    """Of the tensor that receives the unscaled values."""
    in_place: bool = False
    offset: int = 0
    """Distance of the values from a multiple of 64 bytes, in elements."""
    out_offset: int = 0
    layout: str = "flat"
    out_layout: str | None = None
    """None: as the values lie."""

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype if self.in_place else self.out


@dataclass(frozen=True)
class Case:
    """One sweep."""

    shards: Sequence[Shard]
    inv_scale: float = 1.0
    want_norm: bool = True
    limits: Limits | None = None

    @property
    def num_slots(self) -> int:
        return max(shard.slot for shard in self.shards) + 2

    @property
    def num_groups(self) -> int:
        return max(shard.group for shard in self.shards) + 1

    @property
    def numel(self) -> int:
        return sum(shard.codes.size for shard in self.shards)

    @cached_property
    def expected(self) -> Expected:
        """What the oracle finds, computed once for all backends."""
        return expected(self)


@dataclass
class Expected:
    """What a sweep must find."""

    slots: NDArray[np.int64]
    sums: NDArray[np.float64]
    counts: NDArray[np.int64]
    outs: list[Codes | None] = field(default_factory=list)


def expected(case: Case) -> Expected:
    """To be called without the flush-to-zero mode, which numpy's arithmetic obeys."""
    wanted = Expected(
        np.zeros(case.num_slots, np.int64), np.zeros(case.num_groups), np.zeros((case.num_slots, len(Count)), np.int64)
    )
    with np.errstate(all="ignore"):
        for shard in case.shards:
            _expect(wanted, shard, case)
    return wanted


def _expect(wanted: Expected, shard: Shard, case: Case) -> None:
    values = values_of(shard.codes, shard.dtype)
    factor = np.float64(case.inv_scale if shard.is_scaled else 1.0)
    if shard.scale_inv is not None:
        factor = factor * np.float64(np.float32(shard.scale_inv))
    magnitudes = np.abs(values)
    wanted.slots[shard.slot] = max(wanted.slots[shard.slot], _amax_bits(magnitudes, factor, shard))
    wanted.sums[shard.group] += shard.weight * np.sum(np.square(values)) * factor * factor
    counts = wanted.counts[shard.slot]
    counts[Count.NONFINITE] += np.count_nonzero(~np.isfinite(values))
    if case.limits is not None:
        zero_up_to, normal_from = (np.float64(limit) / factor for limit in case.limits)
        finite = magnitudes[np.isfinite(values)]
        counts[Count.ZERO] += np.count_nonzero(finite == 0)
        counts[Count.LOST] += np.count_nonzero((finite > 0) & (finite <= zero_up_to))
        counts[Count.SUBNORMAL] += np.count_nonzero((finite > zero_up_to) & (finite < normal_from))
    out = shard.out_dtype
    wanted.outs.append(out and unscaled(shard.codes, shard.dtype, factor.astype(np.float32), out))


def _amax_bits(magnitudes: NDArray[np.float64], factor: np.float64, shard: Shard) -> int:
    if np.isnan(magnitudes).any():
        return NAN_BITS
    amax = magnitudes.max(initial=0.0)
    if math.isinf(amax):
        return INF_BITS
    amax = np.float64(np.float32(min(amax, largest_of(torch.float32))))
    if shard.out_dtype is not None:
        largest = largest_of(shard.out_dtype)
    else:
        has_own = shard.scale_inv is None or shard.dtype is torch.float64
        largest = largest_of(shard.dtype if has_own else torch.float32)
    unscaled = amax * factor
    if not unscaled <= largest:
        return INF_BITS
    return int(min(np.float32(unscaled), np.finfo(np.float32).max).view(np.int32))


def unscaled(codes: Codes, dtype: torch.dtype, factor: np.float32, out: torch.dtype) -> Codes:
    wide = np.dtype(np.float64 if dtype is torch.float64 else np.float32)
    return narrowed(codes.view(NUMPY[dtype]).astype(wide) * factor.astype(wide), out)
