"""Times of several pieces of work, taken in turn, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Timing", "interleaved"]

_FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one piece of work."""

    median_ms: float
    quartiles_ms: tuple[float, float]
    samples_ms: tuple[float, ...]

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """At least two samples."""
        lower, median, upper = statistics.quantiles(samples_ms, n=4, method="inclusive")
        return cls(median, (lower, upper), tuple(samples_ms))


def interleaved(
    runs: Sequence[Callable[[], object]],
    device: torch.device,
    rounds: int,
    budget_s: float,
    on_round: Callable[[int], object] = lambda done: None,
) -> list[Timing]:
    """Runs everything once in every round, in an order that is drawn anew, after two rounds to warm up.

    Args:
        rounds: how often each is measured, at least three times.
        budget_s: what is so slow that it would take more than its share of this many seconds is measured in fewer of
            the rounds, spread evenly over them; still three times at least.
        on_round: is told the number of rounds that are done.

    Syncs host: yes.
    """
    clock = _cuda_ms if device.type == "cuda" else _cpu_ms
    for run in runs:
        clock(run)
    share_ms = budget_s * 1000 / len(runs)
    rounds = max(rounds, _FEWEST_SAMPLES)
    wanted = [min(rounds, max(_FEWEST_SAMPLES, int(share_ms / max(clock(run), 1e-3)))) for run in runs]
    samples: list[list[float]] = [[] for _ in runs]
    order = random.Random(0)
    for done in range(rounds):
        due = [index for index, n in enumerate(wanted) if (done + 1) * n // rounds > done * n // rounds]
        for index in order.sample(due, len(due)):
            samples[index].append(clock(runs[index]))
        on_round(done + 1)
    return [Timing.of(of_one) for of_one in samples]


def _cpu_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def _cuda_ms(run: Callable[[], object]) -> float:
    """From an idle device, so that the time to launch counts, as far as it is not hidden behind the work itself."""
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
