"""Where the time of a step goes, without making the device wait."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distscale import Reducer

__all__ = ["Stopwatch", "TimedReducer", "time_optimizer"]


class Stopwatch:
    """Named moments of one step: times of the host on a CPU, events of the current stream on a GPU.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._moments: dict[str, Any] = {}

    def restart(self) -> None:
        """Forgets the moments of the step before."""
        self._moments.clear()

    def mark(self, moment: str) -> None:
        """Notes that ``moment`` is now. Syncs host: no."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments[moment] = event
        else:
            self._moments[moment] = time.perf_counter()

    def seconds(self, begin: str, end: str) -> float:
        """Returns the time between two moments, 0 if one was not marked. Syncs host: yes."""
        if begin not in self._moments or end not in self._moments:
            return 0.0
        first, last = self._moments[begin], self._moments[end]
        if self._is_cuda:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1000
        return float(last - first)


def time_optimizer(optimizer: Optimizer, stopwatch: Stopwatch) -> None:
    """Marks "optimizer begins" and "optimizer ends" around the optimizer's own step, whoever calls it."""
    optimizer.register_step_pre_hook(lambda *_: stopwatch.mark("optimizer begins"))
    optimizer.register_step_post_hook(lambda *_: stopwatch.mark("optimizer ends"))


class TimedReducer:
    """A reducer that marks "exchange begins" and "exchange ends"; the waiting for peers lies between them."""

    def __init__(self, inner: Reducer, stopwatch: Stopwatch) -> None:
        self._inner = inner
        self._stopwatch = stopwatch
        self.rank = inner.rank
        self.world_size = inner.world_size

    def device(self, preferred: torch.device) -> torch.device:
        return self._inner.device(preferred)

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        self._stopwatch.mark("exchange begins")
        self._inner.reduce_(maxima, sums)
        self._stopwatch.mark("exchange ends")

    def gather(self, item: Any) -> list[Any]:
        return self._inner.gather(item)
