"""What ranks find out only together: whether the exchange decides rightly, how long it takes, whose clock is off."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distscale.errors import DistScaleError
from distscale.reducers import Reducer
from distscale.scaler import DistributedGradScaler

__all__ = ["Exchange", "clock_offset", "try_exchange"]

_NUM_STEPS, _PLANTED_AT = 12, 6
_NUMEL = 1024
_ROUNDS = 5


@dataclass(frozen=True)
class Exchange:
    """What one rank has seen of some steps with a planted inf."""

    planted_on: int
    """The rank with the inf."""
    median_ms: float | None
    """Of the exchanges, waiting for peers included."""
    faults: tuple[str, ...]
    """What was wrong; empty: nothing."""


class _Timed:
    """A reducer that keeps the time of each exchange."""

    def __init__(self, inner: Reducer, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.world_size = inner.rank, inner.world_size
        self.seconds: list[float] = []

    def device(self, preferred: torch.device) -> torch.device:
        return self._inner.device(preferred)

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        begin = time.perf_counter()
        self._inner.reduce_(maxima, sums)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds.append(time.perf_counter() - begin)

    def gather(self, item: Any) -> list[Any]:
        return self._inner.gather(item)


def try_exchange(reducer: Reducer, device: torch.device) -> Exchange:
    """Takes steps with a scaler of its own, in one of which the last rank has an inf. Collective: yes.

    Returns what is wrong in place of raising it, as long as the ranks can still talk about it.

    Raises:
        ProtocolError: if a peer died or did not answer.
    """
    timed = _Timed(reducer, device)
    planted_on = reducer.world_size - 1
    weight = nn.Parameter(torch.zeros(_NUMEL, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = DistributedGradScaler(
        device.type, init_scale=1024.0, max_norm=float("inf"), reducer=timed, names=[("weight", weight)]
    )
    found = []
    for step in range(_NUM_STEPS):
        scale = scaler.scale(torch.zeros((), device=device)) + scaler.get_scale()
        weight.grad = scale.expand(_NUMEL).clone()
        if step == _PLANTED_AT and reducer.rank == planted_on:
            weight.grad[_NUMEL // 2] = float("inf")
        try:
            scaler.step(optimizer)
            scaler.update()
            report = scaler.last_step
        except DistScaleError as error:
            # All ranks see the same, and take no further step.
            return Exchange(planted_on, None, (f"{type(error).__name__}: {error}",))
        assert report is not None
        culprit = report.culprit and (report.culprit.rank, report.culprit.kind)
        if step == _PLANTED_AT and (not report.skipped or culprit != (planted_on, "inf")):
            seen = f"blames {report.culprit}" if report.culprit else "was not found"
            found.append(f"the inf planted on rank {planted_on} {seen}")
        if step != _PLANTED_AT and report.skipped:
            found.append(f"a clean step was skipped, for {report.culprit}")
    applied = -_NUM_STEPS + 1.0
    if not found and not torch.equal(weight.detach().cpu(), torch.full((_NUMEL,), applied)):
        found.append("the optimizer has not taken the steps that were decided")
    return Exchange(planted_on, 1000 * statistics.median(timed.seconds[1:]), tuple(found))


def clock_offset(reducer: Reducer) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's, to within the time of a gather. Collective: yes."""
    offsets: list[float] = []
    for _ in range(_ROUNDS):
        reducer.gather(None)  # all come out of it at nearly the same time
        times = reducer.gather(time.time())
        offsets.append(times[reducer.rank] - times[0])
    return statistics.median(offsets)
