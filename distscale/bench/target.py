"""What this project promises of its own speed, and whether a measurement keeps the promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from distscale.bench.timing import Timing

__all__ = ["Target", "targets"]


@dataclass(frozen=True)
class Target:
    """One promise."""

    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool:
        """Whether the measurement keeps it."""
        return (self.at_most is None or self.measured <= self.at_most) and (
            self.at_least is None or self.measured >= self.at_least
        )


_LARGE, _SMALL = (64 << 20, 64), (1000 << 12, 1000)
_OVER_TORCH = {"fp32": (3, 10), "fp16": (8, 20), "bf16": (50, 100)}


def targets(
    device: torch.device, dtype: str, numel: int, num_tensors: int, timings: Mapping[str, Timing]
) -> Iterator[Target]:
    """The promises for this setting; none for others than 64 Mi elements in 64 tensors, or 1000 tensors of 4 Ki.

    Args:
        timings: by the keys of the candidates, those that could be measured.
    """

    def ratio(slow: str, fast: str) -> float:
        return timings[slow].median_ms / timings[fast].median_ms

    is_fp8 = dtype not in _OVER_TORCH
    if device.type == "cuda":
        if (numel, num_tensors) == _LARGE:
            # A copy moves every byte twice.
            yield Target(
                "bandwidth of the sweep / of a copy", ratio("copy", "sweep") / 2, at_least=0.8 if is_fp8 else 0.9
            )
    elif (numel, num_tensors) == _LARGE:
        if "read" in timings:
            yield Target("sweep / plain read", ratio("sweep", "read"), at_most=1.5 if is_fp8 else 1.15)
        if not is_fp8:
            alone, with_amax = _OVER_TORCH[dtype]
            yield Target("torch's unscale, norm, clip / sweep", ratio("torch_sequence", "sweep"), at_least=alone)
            yield Target("the same with amax / sweep", ratio("torch_sequence_amax", "sweep"), at_least=with_amax)
    elif (numel, num_tensors) == _SMALL and not is_fp8:
        yield Target("torch's unscale, norm, clip / sweep", ratio("torch_sequence", "sweep"), at_least=3)
