"""What a sweep is asked and what it answers, whichever code does it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["INF_BITS", "Count", "Limits", "Part", "Request", "Swept"]

INF_BITS = 0x7F800000
"""Bits of a float32 inf; NaN lies above, every finite value below."""


class Part(NamedTuple):
    """One shard to sweep."""

    values: Tensor
    """Real, any floating dtype, any shape and device."""
    slot: int
    """Of its amax and counts. Several parts may share one."""
    weight: float
    """1 / replicas: over all ranks, the weighted parts add up to one full gradient."""
    is_scaled: bool
    """Whether the values still carry the loss scale."""
    group: int = 0
    """Of its sum of squares."""
    scale_inv: Tensor | None = None
    """fp32, one element, on the device of ``values``: what the values of an FP8 tensor are multiplied with."""
    out: Tensor | None = None
    """Receives the unscaled values: ``values`` itself, or a tensor like it in another dtype. None: read only."""


class Limits(NamedTuple):
    """Where a floating-point format loses values, by magnitude (round to nearest, ties to even)."""

    zero_up_to: float
    """Values up to here become zero: half of the smallest subnormal number, a tie that goes to the even zero."""
    normal_from: float
    """Values from here on become normal numbers: the tie below the smallest of them goes to it, for it is even."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> Limits:
        """Those of a format with subnormal numbers."""
        info = torch.finfo(dtype)
        half_step = info.smallest_normal * info.eps / 2
        return cls(half_step, info.smallest_normal - half_step)


class Request(NamedTuple):
    """What is wanted of all parts of one sweep."""

    num_slots: int
    inv_scale: Tensor
    """float64, shape (): reciprocal of the scale that scaled parts carry."""
    want_norm: bool
    num_groups: int = 1
    limits: Limits | None = None
    """Of the format to count losses for, on profiling steps."""


class Count(IntEnum):
    """Columns of :attr:`Swept.counts`."""

    NONFINITE = 0
    ZERO = 1
    """Only with limits, as the next two."""
    LOST = 2
    """Not zero, and would be zero in the format without the scale."""
    SUBNORMAL = 3
    """Would be a subnormal number of the format without the scale."""


class Swept(NamedTuple):
    """What one sweep found."""

    slots: Tensor
    """int32, shape (num_slots,): amax bits of the unscaled values. A slot whose amax is finite now, and would not be
    in its own dtype after unscaling, reads as inf."""
    sums: Tensor | None
    """float64, shape (num_groups,): weighted sums of the squares of the unscaled values; None if not wanted."""
    counts: Tensor
    """int64, shape (num_slots, len(Count))."""
