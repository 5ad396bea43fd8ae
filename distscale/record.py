"""What happened in a step: the report, its way from the device to the host, and a JSON line for it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["ByTensor", "Culprit", "HostCopy", "JsonlRecord", "StepReport"]


@dataclass(frozen=True)
class Culprit:
    """The non-finite value that made all ranks skip."""

    rank: int
    """That found it. With sharded gradients, which are summed over ranks first, that is the rank of the shard."""
    tensor: str
    """Name of the parameter, or "loss" if the loss itself was not finite."""
    kind: Literal["inf", "nan"]


class ByTensor(Mapping[str, float]):
    """A number for each tensor, by name."""

    def __init__(self, names: Sequence[str], numbers: Sequence[float] | np.ndarray = ()) -> None:
        self._slots: Mapping[str, int] = {name: slot for slot, name in enumerate(names)}
        self._numbers = numbers

    def __getitem__(self, name: str) -> float:
        return float(self._numbers[self._slots[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True)
class StepReport:
    """One decision, equal on all ranks."""

    step: int
    """Number of updates before this one, over the whole training, restarts included."""
    skipped: bool
    scale: float
    """The scale that the gradients carried."""
    next_scale: float
    """The scale after ``update()``."""
    grad_norm: float | None
    """Norm of the full unscaled gradients before clipping; None without ``max_norm``; not finite on an overflow."""
    clip_coef: float | None
    """In [0, 1]; multiplied the gradients. None without ``max_norm`` or if skipped."""
    culprit: Culprit | None
    """None if the step was applied, or was skipped for another reason than a non-finite value."""
    amax: Mapping[str, float] = field(repr=False)
    """Largest absolute value of each gradient, over all ranks, in unscaled units; inf or NaN where one was."""
    vetoed_by: int | None = None
    """Highest rank that called ``veto()``."""
    stop_requested: bool = False
    """Whether any rank called ``request_stop()`` before this step."""
    fp8_amax: Mapping[str, float] = field(default_factory=dict, repr=False)
    """As ``amax``, of each FP8 tensor, over all ranks and micro-batches; 0 if none used it."""
    num_saturated: Mapping[str, float] = field(default_factory=dict, repr=False)
    """How many values of each gradient that was sent in FP8 were beyond its scale, over all ranks."""

    @classmethod
    def unchecked(cls, step: int) -> StepReport:
        """Of a disabled scaler, which applies every step and knows nothing about it."""
        return cls(step, False, 1.0, 1.0, None, None, None, {})


class HostCopy:
    """A copy of device tensors on its way to the host, which nobody waits for until it is read."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = [tensor.detach() for tensor in tensors]
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:
            self._host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_instant(self) -> bool:
        """Whether there is nothing to wait for, since the tensors are on the host."""
        return self._event is None

    def read(self) -> list[np.ndarray]:
        """Waits for the copy. Syncs host: yes, for this copy alone."""
        if self._event is not None:
            self._event.synchronize()
        return [host.numpy() for host in self._host]


class JsonlRecord:
    """An ``on_step`` callback that appends each report to a file, one JSON object a line.

    Non-finite numbers are written as the strings "inf", "-inf" and "nan", which JSON has no numbers for.

    Args:
        path: created with its parents if missing.
        resume_step: lines of this step and later ones, and a line that a crash cut short, are dropped first, so that
            the file holds every step once.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line, step in _complete_lines(self.path) if step < resume_step]
        aside = self.path.with_name(self.path.name + ".tmp")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())  # or the loss of power could leave neither the old file nor the new one
        aside.replace(self.path)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def __call__(self, report: StepReport, **extra: object) -> None:
        """Appends ``report``, without its amax values, and whatever else is known about the step.

        ``num_saturated``, over all gradients, if any are sent in FP8.
        """
        entry = {
            "step": report.step,
            "skipped": report.skipped,
            "scale": report.scale,
            "next_scale": report.next_scale,
            "grad_norm": report.grad_norm,
            "clip_coef": report.clip_coef,
            "culprit": vars(report.culprit) if report.culprit else None,
            "vetoed_by": report.vetoed_by,
            **({"num_saturated": sum(report.num_saturated.values())} if report.num_saturated else {}),
            **extra,
        }
        self._file.write(json.dumps({key: _json_value(value) for key, value in entry.items()}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _json_value(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _complete_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Lines that end, parse, and name a step; only the last line of a file can be cut short."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        if line.endswith("\n"):
            yield line, int(step)
