"""What a call must lead to, in the words of the oracle, and the rule by which the scale moves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from calls import World


class Stage(Enum):
    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class Refused(Exception):
    """The scaler must refuse this call; ``args[0]`` is the name of the error."""


@dataclass(frozen=True)
class Report:
    """What every rank's StepReport must say."""

    step: int
    skipped: bool
    scale: float
    next_scale: float
    grad_norm: float | None
    clip_coef: float | None
    culprit: tuple[int, str, str] | None
    amax: tuple[tuple[str, float], ...]
    vetoed_by: int | None
    stop_requested: bool


@dataclass(frozen=True)
class Trackers:
    """What the policy remembers."""

    scale: float
    growth: int
    hysteresis: int
    blocked: int


@dataclass
class Decided:
    """One decision of all ranks; the flags are those of all decisions since the last update."""

    report: Report
    trackers: Trackers
    overflow: bool
    lost: bool
    clean: bool


@dataclass
class Expected:
    """What must be seen on every rank after a call."""

    error: str | None
    reports: list[Report]
    """That ``on_step`` got during the call."""
    last_step: Report | None
    """If the call was a step whose caller reads the report."""
    num_exchanges: int


def next_trackers(world: World, growth_interval: int, now: Trackers, decided: Decided) -> Trackers:
    """The rule of every policy."""
    scale, growth, hysteresis, is_blocked = now.scale, now.growth, now.hysteresis, decided.lost
    if world.policy != "dynamic":
        is_blocked |= decided.overflow
    else:
        if decided.overflow:
            growth = 0
            hysteresis = max(hysteresis - 1, 0)
            if hysteresis == 0:
                is_blocked |= scale <= world.min_scale
                scale = float(np.float32(max(scale * world.backoff_factor, world.min_scale)))
        if decided.lost:
            growth = 0
        if decided.clean:
            growth += 1
            if growth >= growth_interval:
                growth = 0
                hysteresis = world.hysteresis
                scale = float(np.float32(min(scale * world.growth_factor, world.max_scale)))
    blocked = now.blocked + 1 if is_blocked else 0 if decided.clean else now.blocked
    return Trackers(scale, growth, hysteresis, blocked)
