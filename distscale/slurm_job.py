"""What a batch script is written from, checked before SLURM sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from distscale.errors import ConfigError

__all__ = ["WARNING_S", "Job", "Kind"]

Kind = Literal["torchrun", "srun", "preflight"]
"""What srun starts: one torchrun a node, one rank a GPU, or ``distscale check`` in place of every rank."""

WARNING_S = 300
"""From SLURM's warning to the end of the time: for the step in progress and a checkpoint."""
# The name stands in the names of files; the others are what a site has called them.
_PATTERNS = {"name": r"\w[\w.,+-]*", "account": r"\w[\w.,+:/@-]*", "partition": r"\w[\w.,+:/@-]*"}
_TIME = re.compile(r"\d{1,6}(-([01]?\d|2[0-3]))?(:[0-5]\d){0,2}", re.ASCII)  # 90, 90:00, 12:00:00, 2-12, 2-12:00


@dataclass(frozen=True)
class Job:
    """What a batch script is written from.

    Raises:
        ConfigError: for a value that SLURM would not take.
    """

    name: str
    """Of the job, and of its logs."""
    config: str
    """Path of the TOML file, from the root of the repository."""
    kind: Kind = "torchrun"
    deepspeed: str | None = None
    """Path of the JSON file of a DeepSpeed engine."""
    account: str = "ACCOUNT"
    partition: str = "PARTITION"
    nodes: int = 2
    ranks_per_node: int = 8
    """GPUs of a node; with ``cpu``, processes."""
    cpu: bool = False
    """Train on CPUs: no GPU is asked for."""
    time: str | None = None
    """Time limit in SLURM's form; None: that of the partition."""
    max_requeues: int = 20

    def __post_init__(self) -> None:
        for key, pattern in _PATTERNS.items():
            if not re.fullmatch(pattern, getattr(self, key), re.ASCII):
                raise ConfigError(f"{key} = {getattr(self, key)!r} is no name that SLURM takes; use letters and digits")
        for key, lowest in (("nodes", 1), ("ranks_per_node", 1), ("max_requeues", 0)):
            if getattr(self, key) < lowest:
                raise ConfigError(f"{key} = {getattr(self, key)} must be at least {lowest}")
        if self.time is not None:
            if not _TIME.fullmatch(self.time):
                raise ConfigError(f"time = {self.time!r} is no time limit; write one like 90 (minutes) or 2-12:00")
            # A run is warned this long before its end, and would stop at its first step for good.
            lowest_s = WARNING_S if self.trains else 0
            if _seconds(self.time) <= lowest_s:
                raise ConfigError(
                    f"time = {self.time!r} must be above {lowest_s // 60} minutes; without it there is the limit of "
                    "the partition"
                )
        for path in (self.config, self.deepspeed or ""):
            if not path.isprintable():
                raise ConfigError(f"the path {path!r} cannot stand in a script; rename it")
            if path.startswith("-"):
                raise ConfigError(f"the path {path!r} would be taken for an option; write './{path}'")

    @property
    def trains(self) -> bool:
        """Whether it is more than a check of the ranks."""
        return self.kind != "preflight"


def _seconds(time: str) -> int:
    """Of a limit in SLURM's form."""
    days, _, rest = time.rpartition("-")
    units = (3600, 60, 1) if days or rest.count(":") == 2 else (60, 1)
    return 86400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(rest.split(":"), units, strict=False))
