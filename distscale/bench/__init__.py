"""Measures sweeps and FP8 kernels beside torch's own operators and the limits of the machine: ``distscale bench``."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distscale.bench.candidate import DTYPES, Candidate, candidates, gradients
from distscale.bench.fp8 import fp8_candidates, most_values
from distscale.bench.memory import memory_growth
from distscale.bench.target import Target, targets
from distscale.bench.timing import Timing, interleaved
from distscale.errors import ConfigError
from distscale.machine import OtherWork, available_memory, commit, device_name, hardware, versions
from distscale.sweep.choice import choose

__all__ = ["DTYPES", "Candidate", "Measured", "Options", "Result", "Target", "Timing", "measure", "report"]

_SIDES = ("limit", "distscale", "torch")
_BUDGET_S = 20.0
"""To spend on the samples of one dtype: three of them, with what comes beside it, end within two minutes."""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    device: str = "cpu"
    numel: int = 64 << 20
    """Of all tensors together."""
    num_tensors: int = 64
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    """Of :data:`DTYPES`."""
    rounds: int = 15
    """What is slow is measured in fewer of them."""

    def check(self) -> None:
        """Raises ConfigError for what cannot be measured here."""
        if self.num_tensors > self.numel:
            raise ConfigError(
                f"{self.numel} elements cannot be split into {self.num_tensors} tensors: "
                "give --tensors that is at most --numel"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda needs a GPU, and torch sees none here: use --device cpu")
        # Gradients and their copy, and one of torch's temporaries in fp32. With FP8, also gradients and their copy in
        # fp32, two messages, and one more temporary.
        needed = max(
            2 * width * self.numel + (18 * most_values(self.numel, self.num_tensors) if width == 1 else 4 * self.numel)
            for width in {DTYPES[dtype].itemsize for dtype in self.dtypes}
        )
        free = available_memory(torch.device(self.device))
        if needed > free:
            raise ConfigError(
                f"{self.numel} elements need {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: "
                "give a smaller --numel"
            )


@dataclass(frozen=True)
class Measured:
    """One candidate's result."""

    candidate: Candidate
    timing: Timing | None
    """None for what torch cannot do on this dtype."""

    @property
    def gb_per_s(self) -> float | None:
        """Of what is read and written."""
        return self.candidate.num_bytes / self.timing.median_ms / 1e6 if self.timing else None


@dataclass(frozen=True)
class Result:
    """All of one dtype."""

    dtype: str
    gradient_bytes: int
    sweep_memory_bytes: int
    """By which the peak memory grows in a sweep over all gradients."""
    cores_of_others: float | None
    """That other processes kept busy on average while times were taken."""
    disturbed: bool
    """Whether those are more than this process left free. Then times are too long, and torch's, whose threads wait
    for each other at every tensor, more than others'."""
    measured: tuple[Measured, ...]
    targets: tuple[Target, ...]

    @property
    def timings(self) -> dict[str, Timing]:
        """By key, of what could be measured."""
        return {one.candidate.key: one.timing for one in self.measured if one.timing}


def measure(options: Options, dtype: str, on_round: Callable[[int], object] = lambda done: None) -> Result:
    """Measures everything for one of the options' dtypes, with torch's number of threads.

    Args:
        options: checked.
        on_round: is told the number of rounds that are done.

    Collective: no. Syncs host: yes.
    """
    device, numel, num_tensors = torch.device(options.device), options.numel, options.num_tensors
    growth = memory_growth(dtype, numel, num_tensors, device, torch.get_num_threads())
    grads = gradients(numel, num_tensors, DTYPES[dtype], device)
    works = [_works(candidate) for candidate in _everything(gradients(8, 2, DTYPES[dtype], device))]
    everything = _everything(grads)
    possible = [candidate for candidate, it_works in zip(everything, works, strict=True) if it_works]
    others = OtherWork()
    times = interleaved(
        [candidate.run for candidate in possible],
        device,
        options.rounds,
        _BUDGET_S,
        on_round,
    )
    cores_of_others = others.cores()
    timings = {candidate.key: timing for candidate, timing in zip(possible, times, strict=True)}
    return Result(
        dtype,
        numel * DTYPES[dtype].itemsize,
        growth,
        cores_of_others,
        _is_disturbed(device, cores_of_others),
        tuple(Measured(one, timings.get(one.key)) for one in everything),
        tuple(targets(device, dtype, numel, num_tensors, timings)),
    )


def report(options: Options, results: Sequence[Result]) -> dict[str, Any]:
    """All that a reader of the numbers may ask for, for JSON: times in ms, memory in bytes, rates in GB/s."""
    device = torch.device(options.device)
    choice = choose(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "arguments": dataclasses.asdict(options) | {"threads": torch.get_num_threads()},
        "device": device_name(device),
        "sweep": {"name": choice.name, "why": choice.why},
        "results": [_plain(one) for one in results],
    }


def _everything(grads: list[Tensor]) -> list[Candidate]:
    """By side, as the table shows them."""
    numel = sum(grad.numel() for grad in grads)
    found = [*candidates(grads), *fp8_candidates(numel, len(grads), grads[0].dtype, grads[0].device)]
    return sorted(found, key=lambda one: _SIDES.index(one.side))


def _is_disturbed(device: torch.device, cores_of_others: float | None) -> bool:
    """Whether other processes took cores that the measured work would have used."""
    wanted = 1 if device.type == "cuda" else torch.get_num_threads()
    free = (os.cpu_count() or 1) - wanted
    return cores_of_others is not None and cores_of_others > max(free, 0) + 0.1


def _works(candidate: Candidate) -> bool:
    """Whether torch has what it takes, asked with a few values, so that a fault with many is not taken for a no."""
    try:
        candidate.run()
    except (RuntimeError, TypeError):
        if candidate.side != "torch":
            raise
        return False
    return True


def _plain(one: Result) -> dict[str, Any]:
    return {
        "dtype": one.dtype,
        "gradient_bytes": one.gradient_bytes,
        "sweep_memory_bytes": one.sweep_memory_bytes,
        "cores_of_others": one.cores_of_others,
        "disturbed": one.disturbed,
        "measured": {
            each.candidate.key: {
                "label": each.candidate.label,
                "side": each.candidate.side,
                "bytes": each.candidate.num_bytes,
                "gb_per_s": each.gb_per_s,
                **(dataclasses.asdict(each.timing) if each.timing else {"median_ms": None}),
            }
            for each in one.measured
        },
        "targets": [dataclasses.asdict(target) | {"reached": target.reached} for target in one.targets],
    }
