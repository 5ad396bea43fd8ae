"""Loss-scale rules: pure functions from (state, outcome of a step) to the next state.

All three policies have one shape, so that the scaler need not know which one it holds. They work on small device
tensors and never look at a value on the host; equal inputs give bitwise equal outputs, on every rank.

The rule of dynamic scaling is that of "Mixed Precision Training" (arXiv 1710.03740, section 3.2), with the arithmetic
of ``torch.amp.GradScaler``: products are formed in float64 and rounded once to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from distscale.errors import ConfigError

__all__ = [
    "MAX_COUNT",
    "MAX_SCALE",
    "MIN_SCALE",
    "REFILL_FOR_ANY_CLEAN_STEP",
    "DynamicScale",
    "NoScaling",
    "Outcome",
    "Policy",
    "ScaleState",
    "StaticScale",
    "is_number",
    "scale_bounds",
]

# The widest range in which a scale *and* its reciprocal are normal float32 numbers: outside it, 1/scale is infinite
# or is flushed to zero, and the gradients are lost with it.
MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**126
# What rules that refill their tolerance on any clean step become: at most one step in 11 is lost without a back-off.
REFILL_FOR_ANY_CLEAN_STEP = 10
MAX_COUNT = 2**31 - 1  # counts are compared with int32 tensors, and travel in one


class ScaleState(NamedTuple):
    """What a policy remembers, all of shape ()."""

    scale: Tensor
    """fp32: the loss is multiplied by it."""
    growth_tracker: Tensor
    """int32: consecutive clean steps since the last overflow or growth; after a growth it begins with the policy's
    ``growth_delay``."""
    hysteresis_tracker: Tensor
    """int32: overflows that the policy will still tolerate, plus one; 0 once it backs off at each."""
    blocked_steps: Tensor
    """int32: skipped steps, since the last clean one, that a lower scale could not have saved."""


class Outcome(NamedTuple):
    """What happened between two updates, agreed by all ranks; bool, shape ()."""

    overflow: Tensor
    """A gradient was not finite although the loss was: the scale is too high."""
    lost: Tensor
    """The loss itself was not finite: no scale can help."""
    clean: Tensor
    """Nothing was wrong and nothing was vetoed."""

    def on(self, device: torch.device) -> Outcome:
        """The same on another device."""
        return Outcome(*(flag.to(device, non_blocking=True) for flag in self))

    def followed_by(self, other: Outcome) -> Outcome:
        """Of two decisions before one update."""
        return Outcome(self.overflow | other.overflow, self.lost | other.lost, self.clean & other.clean)


class Policy(Protocol):
    """A rule for the loss scale. Implementations are frozen dataclasses: changing a rule means replacing it."""

    name: ClassVar[str]

    @property
    def init_scale(self) -> float:
        """The scale of the first step."""

    @property
    def hysteresis(self) -> int:
        """The initial ``hysteresis_tracker``."""

    def next_state(self, state: ScaleState, outcome: Outcome) -> ScaleState:
        """Returns the state for the next step. Collective: no. Syncs host: no."""


@dataclass(frozen=True)
class DynamicScale:
    """Grow after ``growth_interval`` clean steps in a row, back off on overflow.

    Args:
        init_scale: scale of the first step.
        growth_factor: > 1. Multiplies the scale after ``growth_interval`` consecutive clean steps.
        backoff_factor: in (0, 1). Multiplies the scale on an overflow.
        growth_interval: >= 1, in steps.
        hysteresis: >= 1. The scale backs off from the ``hysteresis``-th overflow on, counted since the last growth;
            1 backs off at once, as torch does. Megatron's meaning of the word.
        min_scale: floor. Reaching it is no error; staying there with overflows is
            (:class:`~distscale.ScaleExhaustedError`).
        max_scale: cap.
        hysteresis_refill: >= 2. This many clean steps in a row make the scale tolerate ``hysteresis`` - 1 overflows
            again; None: only its growth does, as in Megatron and by default in DeepSpeed. 1 is refused: with it, a
            scale at which every other step overflows would never be lowered.
        growth_delay: >= 0. Clean steps that the first growth after an overflow, or of all, takes beyond
            ``growth_interval``; DeepSpeed's rule has 1.
    """

    name: ClassVar[str] = "dynamic"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    hysteresis_refill: int | None = None
    growth_delay: int = 0

    def __post_init__(self) -> None:
        for argument in ("min_scale", "max_scale", "init_scale"):
            _check_scale(argument, getattr(self, argument))
        _check_number("growth_factor", self.growth_factor, lambda x: 1 < x < math.inf, "a finite number above 1")
        _check_number("backoff_factor", self.backoff_factor, lambda x: 0 < x < 1, "a number between 0 and 1, exclusive")
        _check_count("growth_interval", self.growth_interval)
        _check_count("hysteresis", self.hysteresis)
        if self.hysteresis_refill is not None:
            _check_count("hysteresis_refill", self.hysteresis_refill, least=2)
        _check_count("growth_delay", self.growth_delay, least=0, most=MAX_COUNT - self.growth_interval)
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise ConfigError(
                f"init_scale={self.init_scale:g} must lie between min_scale={self.min_scale:g} "
                f"and max_scale={self.max_scale:g}"
            )

    def next_state(self, state: ScaleState, outcome: Outcome) -> ScaleState:
        overflow, lost, clean = outcome
        tolerance = torch.where(overflow, (state.hysteresis_tracker - 1).clamp(min=0), state.hysteresis_tracker)
        backs_off = overflow & (tolerance == 0)
        run = torch.where(clean, state.growth_tracker + 1, state.growth_tracker)
        grows = clean & (run >= self.growth_interval + self.growth_delay)
        refills = grows if self.hysteresis_refill is None else grows | (clean & (run >= self.hysteresis_refill))

        scale = state.scale.double()
        scale = torch.where(backs_off, (scale * self.backoff_factor).clamp(min=self.min_scale), scale)
        scale = torch.where(grows, (scale * self.growth_factor).clamp(max=self.max_scale), scale)
        return ScaleState(
            scale=scale.float(),
            growth_tracker=torch.where(overflow | lost, 0, torch.where(grows, self.growth_delay, run)).int(),
            hysteresis_tracker=torch.where(refills, self.hysteresis, tolerance).int(),
            blocked_steps=_blocked_steps(state, lost | (backs_off & (state.scale <= self.min_scale)), clean),
        )


@dataclass(frozen=True)
class StaticScale:
    """The same scale for ever. An overflow skips its step and is counted as blocked."""

    name: ClassVar[str] = "static"
    hysteresis: ClassVar[int] = 1
    init_scale: float = 2.0**16

    def __post_init__(self) -> None:
        _check_scale("init_scale", self.init_scale)

    def next_state(self, state: ScaleState, outcome: Outcome) -> ScaleState:
        blocked_steps = _blocked_steps(state, outcome.overflow | outcome.lost, outcome.clean)
        return ScaleState(state.scale, state.growth_tracker, state.hysteresis_tracker, blocked_steps)


@dataclass(frozen=True)
class NoScaling(StaticScale):
    """Scale 1, for BF16 and FP32: the finite check, the norm and the one decision stay."""

    name: ClassVar[str] = "none"
    init_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.init_scale != 1:
            raise ConfigError(f"init_scale={self.init_scale:g} has no meaning with policy 'none'; it is 1")


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, and not True or False, which Python counts as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def scale_bounds(policy: Policy) -> tuple[float, float]:
    """The smallest and the largest scale that ``policy`` can have, and that a saved state of it may hold."""
    if isinstance(policy, DynamicScale):
        return policy.min_scale, policy.max_scale
    if isinstance(policy, NoScaling):
        return 1.0, 1.0
    return MIN_SCALE, MAX_SCALE


def _blocked_steps(state: ScaleState, blocked: Tensor, clean: Tensor) -> Tensor:
    return torch.where(blocked, state.blocked_steps + 1, torch.where(clean, 0, state.blocked_steps)).int()


def _check_scale(argument: str, value: float) -> None:
    allowed = f"a finite number between 2^-126 and 2^126 ({MIN_SCALE:g} to {MAX_SCALE:g})"
    _check_number(argument, value, lambda x: MIN_SCALE <= x <= MAX_SCALE, allowed)


def _check_number(argument: str, value: float, is_allowed: Callable[[float], bool], allowed_range: str) -> None:
    if not (is_number(value) and is_allowed(value)):
        raise ConfigError(f"{argument}={value!r} is not allowed: it must be {allowed_range}")


def _check_count(argument: str, value: int, *, least: int = 1, most: int = MAX_COUNT) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = "2^31 - 1" if most == MAX_COUNT else str(most)
        raise ConfigError(f"{argument}={value!r} is not allowed: it must be a whole number from {least} to {bound}")
