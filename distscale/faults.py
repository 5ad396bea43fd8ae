"""Faults on purpose, to see a run survive them: bad values, dead and slow ranks, spoilt checkpoints. Off by default.

They are written one after the other, parted by semicolons or new lines, in ``DISTSCALE_FAULTS`` or in a config::

    inf step=5 rank=1 tensor=blocks.0.up; kill step=12 rank=2; full_disk step=20 rank=0 restart=1

A fault comes about on its rank, at its step, and only in the life of the job that ``restart`` says (0: the first), so
that a run that came back from it is not struck again. Checkpoints are named by the number of steps that are done.
:class:`distscale.injector.Injector` lets them come about.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from distscale.errors import ConfigError, DistScaleError

__all__ = [
    "BAD_VALUES",
    "KINDS",
    "SETTING",
    "Fault",
    "InjectedError",
    "check_faults",
    "parse_faults",
    "planned_faults",
]

SETTING = "DISTSCALE_FAULTS"
"""Environment variable with faults beside those of the config."""

KINDS = {
    "inf": "writes inf into the gradient of tensor=, before the exchange",
    "-inf": "writes -inf",
    "nan": "writes NaN",
    "raise": "raises an error before the exchange",
    "hang": "never comes to the exchange",
    "kill": "ends the process by SIGKILL before the exchange",
    "slow": "comes to the exchange late by seconds=",
    "scale": "doubles the loss scale of this rank alone, before the exchange",
    "cut_checkpoint": "takes the second half of this rank's file from a checkpoint that is complete",
    "full_disk": "lets the disk be full while this rank writes its file of a checkpoint",
    "kill_in_checkpoint": "ends the process by SIGKILL while this rank writes its file of a checkpoint",
}
"""What each kind does."""
BAD_VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_OF_CHECKPOINTS = frozenset({"cut_checkpoint", "full_disk", "kill_in_checkpoint"})


class InjectedError(DistScaleError):
    """The error of the fault ``raise``."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    """Of :data:`KINDS`."""
    step: int
    """At which it comes about; for a checkpoint, the steps that are done."""
    rank: int
    """On which."""
    restart: int = 0
    """How often the job must have been restarted."""
    tensor: str = ""
    """Name of a parameter; for values alone."""
    seconds: float = 0.0
    """For ``slow`` alone."""

    @property
    def is_of_checkpoint(self) -> bool:
        return self.kind in _OF_CHECKPOINTS

    def __str__(self) -> str:
        words = [self.kind, f"step={self.step}", f"rank={self.rank}"]
        words += [f"tensor={self.tensor}"] if self.tensor else []
        words += [f"seconds={self.seconds:g}"] if self.seconds else []
        return " ".join([*words, f"restart={self.restart}"] if self.restart else words)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Reads faults as they are written in the environment. Pure.

    Raises:
        ConfigError: in a sentence, for the first fault that cannot be meant.
    """
    entries = (entry.strip() for line in text.splitlines() for entry in line.split(";"))
    return tuple(_parse(entry) for entry in entries if entry)


def _parse(entry: str) -> Fault:
    kind, *words = entry.split()
    if kind not in KINDS:
        raise ConfigError(f"the fault {entry!r} is of no known kind; there are {', '.join(KINDS)}")
    needed = {"step", "rank"} | ({"tensor"} if kind in BAD_VALUES else {"seconds"} if kind == "slow" else set())
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and value) or key not in needed | {"restart"} or key in values:
            keys = ", ".join(f"{name}=" for name in sorted(needed))
            raise ConfigError(f"the fault {entry!r} has {word!r}, but {kind} takes {keys} and perhaps restart=, once")
        values[key] = value
    if missing := sorted(needed - values.keys()):
        raise ConfigError(f"the fault {entry!r} lacks {' and '.join(f'{name}=' for name in missing)}; add it")
    step, rank, restart = (_count(entry, key, values.get(key, "0")) for key in ("step", "rank", "restart"))
    seconds = _seconds(entry, values["seconds"]) if kind == "slow" else 0.0
    return Fault(kind, step, rank, restart, values.get("tensor", ""), seconds)


def _count(entry: str, key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"the fault {entry!r} has {key}={text}, which is not a whole number from 0 on")
    return int(text)


def _seconds(entry: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ConfigError(f"the fault {entry!r} has seconds={text}, which is not a number above 0")
    return seconds


def planned_faults(inject: Iterable[str], environ: Mapping[str, str]) -> tuple[Fault, ...]:
    """Returns the faults of a config and of the environment. Pure. Raises ConfigError as :func:`parse_faults` does."""
    try:
        of_environment = parse_faults(environ.get(SETTING, ""))
    except ConfigError as error:
        raise ConfigError(f"{SETTING}: {error}") from None
    return (*parse_faults(";".join(inject)), *of_environment)


def check_faults(
    faults: Iterable[Fault], steps: int, saves_at: Callable[[int], bool], world_size: int | None = None
) -> None:
    """Refuses faults that would never come about.

    Args:
        faults: to check.
        steps: of the run.
        saves_at: whether there is a checkpoint after so many steps.
        world_size: number of ranks; None: not known yet.

    Raises:
        ConfigError: naming the first of them.
    """
    for fault in faults:
        if world_size is not None and fault.rank >= world_size:
            raise ConfigError(f"the fault '{fault}' never comes about: there are {world_size} ranks, from 0 on")
        if fault.is_of_checkpoint and not (fault.step <= steps and saves_at(fault.step)):
            raise ConfigError(f"the fault '{fault}' never comes about: there is no checkpoint after {fault.step} steps")
        if not fault.is_of_checkpoint and fault.step >= steps:
            raise ConfigError(f"the fault '{fault}' never comes about: the run has {steps} steps, from 0 on")
