"""How many values of a tensor a small floating-point format would lose, or keep with less precision.

The reason why FP16 needs a loss scale (arXiv 1710.03740, section 3.2): a gradient below half the smallest
subnormal number rounds to zero, and one below the smallest normal number keeps fewer bits the smaller it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from distscale.sweep import Count, Limits, Part, sweep

__all__ = ["FORMATS", "LossCounts", "count_losses"]

FORMATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp16": torch.float16, "e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}
)
"""The formats that gradients are profiled against, by short name."""


@dataclass(frozen=True)
class LossCounts:
    """Numbers of values; they add up over tensors, ranks and steps."""

    nonzero: int = 0
    """Values that are not zero, infinities and NaNs included."""
    lost: int = 0
    """Nonzero values that become zero in the format."""
    subnormal: int = 0
    """Values that become a subnormal number of the format."""

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.nonzero + other.nonzero, self.lost + other.lost, self.subnormal + other.subnormal)

    @property
    def lost_share(self) -> float:
        """Of the nonzero values, from 0 to 1; 0 if there are none."""
        return self.lost / self.nonzero if self.nonzero else 0.0

    @property
    def subnormal_share(self) -> float:
        """Of the nonzero values, from 0 to 1; 0 if there are none."""
        return self.subnormal / self.nonzero if self.nonzero else 0.0


def count_losses(tensor: Tensor, dtype: torch.dtype, inv_scale: float = 1.0) -> LossCounts:
    """Counts what a cast of ``tensor * inv_scale`` to ``dtype`` would lose.

    Args:
        tensor: real floating point, any shape and device.
        dtype: a floating-point format of at most 16 bits.
        inv_scale: > 0, multiplies the values first, to undo a loss scale; the product is formed in fp64.

    Returns:
        Counts equal to those of a real cast (round to nearest, ties to even).

    Collective: no. Syncs host: yes.
    """
    inv = torch.tensor(inv_scale, dtype=torch.float64, device=tensor.device)
    part = Part(tensor.detach(), slot=0, weight=1.0, is_scaled=True)
    counts = sweep([part], 1, inv, False, tensor.device, limits=Limits.of(dtype)).counts[0].tolist()
    return LossCounts(tensor.numel() - counts[Count.ZERO], counts[Count.LOST], counts[Count.SUBNORMAL])
