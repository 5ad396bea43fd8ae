"""The neutral form between all formats: what a configuration says about precision, scale and skips."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from distscale.errors import ConfigError
from distscale.policy import MAX_SCALE, MIN_SCALE

__all__ = ["REASONS_OF_TORCH", "AtFloor", "DType", "Mode", "Reading", "ScalingRule", "differences"]

DType = Literal["fp16", "bf16", "fp32"]
Mode = Literal["dynamic", "static", "none"]
AtFloor = Literal["raise", "skip"]
REASONS_OF_TORCH = {
    "growth_delay": "torch counts clean steps since the start, an overflow or a growth",
    "hysteresis": "torch backs off at each overflow",
    "min_scale": "torch has no floor",
    "max_scale": "torch has no cap",
    "at_floor": "torch never ends the run because of skips",
    "skips_nonfinite": "torch checks only with a scaler, which is there in fp16",
}
"""Why ``torch.amp.GradScaler`` cannot hold a field, for the formats of those who leave the scale to it."""


@dataclass(frozen=True)
class ScalingRule:
    """One rule for the loss scale, with every default of its source written out.

    Fields without an effect have their defaults (:meth:`simplest`), so that rules of equal effect are equal.
    """

    dtype: DType = "fp16"
    mode: Mode = "dynamic"
    """``none`` is the scale 1: a static scale of 1 is the same."""
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Clean steps in a row before the scale grows."""
    growth_delay: int = 0
    """Clean steps that the first growth since the start or an overflow takes beyond ``growth_interval``."""
    hysteresis: int = 1
    """Overflows from which on the scale backs off, counted since the last refill."""
    hysteresis_refill: int | None = None
    """Clean steps in a row that refill it; None: only a growth does."""
    min_scale: float | None = None
    """None: there is no floor."""
    max_scale: float | None = None
    """None: there is no cap."""
    at_floor: AtFloor = "skip"
    """At overflows that a lower scale cannot help: end the run, or skip for ever."""
    max_consecutive_skips: int | None = None
    """With ``raise``: how many of them it takes; None: the first one, or the source does not say."""
    skips_nonfinite: bool = True
    """False: a gradient that is not finite is applied (only with ``none``)."""
    max_norm: float | None = None
    """0: no clipping; inf: the norm is only measured; None: the source does not say."""

    def __post_init__(self) -> None:
        low, high = self.min_scale or 0.0, self.max_scale or float("inf")
        if self.mode == "dynamic" and not low <= self.init_scale <= high:
            raise ConfigError(f"the start {self.init_scale:g} must lie between the floor {low:g} and the cap {high:g}")

    def simplest(self) -> ScalingRule:
        """The rule of equal effect whose idle fields have their defaults."""
        rule = self
        if rule.mode == "dynamic" and (rule.min_scale or MIN_SCALE) == (rule.max_scale or MAX_SCALE):
            rule = dataclasses.replace(rule, mode="static")
        if rule.mode == "none" or (rule.mode == "static" and rule.init_scale == 1):
            rule = dataclasses.replace(rule, mode="none", init_scale=1.0)
        if rule.mode != "none":
            rule = dataclasses.replace(rule, skips_nonfinite=True)
        if rule.mode != "dynamic":
            idle = {name: getattr(_DEFAULTS, name) for name in _OF_DYNAMIC}
            rule = dataclasses.replace(rule, **idle)
        if rule.hysteresis == 1:
            rule = dataclasses.replace(rule, hysteresis_refill=None)
        if not rule.skips_nonfinite:
            rule = dataclasses.replace(rule, at_floor="skip")
        if rule.at_floor == "skip":
            rule = dataclasses.replace(rule, max_consecutive_skips=None)
        return rule


class Reading(NamedTuple):
    """What was read from a configuration."""

    rule: ScalingRule
    notes: list[str]
    """What the source leaves open, or says without effect; a sentence each."""


_OF_DYNAMIC = (
    *("growth_factor", "backoff_factor", "growth_interval", "growth_delay"),
    *("hysteresis", "hysteresis_refill", "min_scale", "max_scale"),
)
_DEFAULTS = ScalingRule()
_WORDS: Mapping[str, Mapping[Any, str]] = {
    "hysteresis_refill": {None: "on growth", 1: "on any clean step"},
    "at_floor": {"raise": "end the run", "skip": "skip for ever"},
    "skips_nonfinite": {True: "skipped", False: "applied"},
    "max_norm": {None: "not given", 0: "no clipping"},
}


def differences(rule: ScalingRule, held: ScalingRule, name: str, reasons: Mapping[str, str]) -> list[str]:
    """One sentence for each field in which a target differs from the rule that it was given.

    Args:
        rule: of the source.
        held: what the target makes of it.
        name: of the target.
        reasons: by field, why; every field that differs has one.
    """
    notes = []
    for field in dataclasses.fields(ScalingRule):
        before, after = getattr(rule, field.name), getattr(held, field.name)
        if before == after or _is_told_elsewhere(field.name, rule, held):
            continue
        notes.append(
            f"{field.name}: {_shown(field.name, before)} becomes {_shown(field.name, after)} in {name}; "
            f"{reasons[field.name]}"
        )
    return notes


def _is_told_elsewhere(field: str, rule: ScalingRule, held: ScalingRule) -> bool:
    """Whether the note on another field says it, or there is nothing to say."""
    if field in _OF_DYNAMIC and rule.mode != held.mode:
        return True
    if field == "init_scale" and rule.mode != held.mode == "none":
        return True
    if field == "hysteresis_refill" and rule.hysteresis != held.hysteresis == 1:
        return True
    if field == "max_consecutive_skips" and rule.at_floor != held.at_floor:
        return True
    # What does not say leaves the gradients as they are.
    return field == "max_norm" and rule.max_norm == 0 and held.max_norm is None


def _shown(field: str, value: Any) -> str:
    words = _WORDS.get(field, {})
    if value in words:
        return words[value]
    return "none" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
