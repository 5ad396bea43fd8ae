"""distscale's own TOML: the sections ``[precision]`` and ``[scaler]`` of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from distscale.convert import sources
from distscale.convert.rule import DType, Mode, Reading, ScalingRule
from distscale.convert.values import Keys, not_looked_at
from distscale.policy import MAX_COUNT, MAX_SCALE, MIN_SCALE, REFILL_FOR_ANY_CLEAN_STEP

__all__ = ["REASONS", "find", "hold", "read", "render"]

REASONS = {
    "growth_delay": "it and growth_interval are at most 2^31 - 1 together",
    "hysteresis_refill": "with one clean step a scale at which every other step overflows would never be lowered, so "
    "distscale asks for at least two; choose another number if you like",
    "max_consecutive_skips": "distscale ends the run after that many skips in a row that no lower scale could have "
    "saved, those of a loss that is not finite included; DeepSpeed at the first overflow at the floor",
    "skips_nonfinite": "distscale checks in every precision",
    "max_norm": "set it if the source clips elsewhere",
}
_SCALER = (
    *(
        "enabled",
        "policy",
        "init_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "min_scale",
        "max_scale",
    ),
    *("growth_delay", "hysteresis", "hysteresis_refill", "max_consecutive_skips", "max_norm"),
)
_DEFAULT_SKIPS = 100


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The TOML, if it has one of the sections."""
    values = sources.toml(text)
    return values if values and any(isinstance(values.get(key), Mapping) for key in ("precision", "scaler")) else None


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads a whole configuration, or those sections alone."""
    notes = not_looked_at(name for name in values if name not in ("precision", "scaler"))
    keys = Keys(values.get("scaler", {}), where, "scaler.")
    keys.refuse_unknown(_SCALER)
    dtype = _word(Keys(values.get("precision", {}), where, "precision."), "dtype", "fp16", DType)
    mode = _word(keys, "policy", "dynamic", Mode)
    skips = keys.count("max_consecutive_skips", _DEFAULT_SKIPS)
    if not keys.flag("enabled", True):
        return Reading(ScalingRule(dtype, "none", skips_nonfinite=False, max_norm=0.0).simplest(), notes)
    start = keys.scale("init_scale", 2.0**16)
    # Beyond these two no scale of fp32 goes: as bounds they are none.
    floor, cap = keys.floor("min_scale", MIN_SCALE), keys.cap("max_scale", MAX_SCALE)
    if mode == "dynamic":
        keys.check_order("init_scale", "min_scale", "max_scale", start, floor, cap)
    interval = keys.count("growth_interval", 2000)
    rule = ScalingRule(
        dtype=dtype,
        mode=mode,
        init_scale=start,
        growth_factor=keys.growth("growth_factor", 2.0),
        backoff_factor=keys.backoff("backoff_factor", 0.5),
        growth_interval=interval,
        growth_delay=keys.count("growth_delay", 0, low=0, high=MAX_COUNT - interval),
        hysteresis=keys.count("hysteresis", 1),
        hysteresis_refill=keys.count("hysteresis_refill", 2, low=2) if "hysteresis_refill" in keys else None,
        min_scale=floor,
        max_scale=cap,
        at_floor="skip" if skips == MAX_COUNT else "raise",
        max_consecutive_skips=skips,
        max_norm=keys.norm("max_norm", 0.0),
    )
    return Reading(rule.simplest(), notes)


def _word(keys: Keys, key: str, default: str, words: Any) -> Any:
    return keys.choice(key, default, {word: word for word in get_args(words)})


def hold(rule: ScalingRule) -> ScalingRule:
    """What distscale can make of ``rule``."""
    skips = rule.max_consecutive_skips
    if rule.at_floor == "raise" and skips is None:
        skips = _DEFAULT_SKIPS
    return dataclasses.replace(
        rule,
        growth_delay=min(rule.growth_delay, MAX_COUNT - rule.growth_interval),
        hysteresis_refill=REFILL_FOR_ANY_CLEAN_STEP if rule.hysteresis_refill == 1 else rule.hysteresis_refill,
        max_consecutive_skips=skips,
        skips_nonfinite=True,
        max_norm=rule.max_norm or 0.0,
    ).simplest()


def render(rule: ScalingRule) -> str:
    """The two sections, for a rule that distscale holds exactly."""
    scaler: dict[str, Any] = {"policy": rule.mode}
    if rule.mode != "none":
        scaler["init_scale"] = rule.init_scale
    if rule.mode == "dynamic":
        names = ("growth_factor", "backoff_factor", "growth_interval", "growth_delay", "hysteresis")
        scaler |= {name: getattr(rule, name) for name in (*names, "hysteresis_refill", "min_scale", "max_scale")}
    scaler["max_consecutive_skips"] = MAX_COUNT if rule.at_floor == "skip" else rule.max_consecutive_skips
    scaler["max_norm"] = rule.max_norm or None
    lines = ["[precision]", f'dtype = "{rule.dtype}"', "", "[scaler]"]
    lines += [f"{name} = {_literal(value)}" for name, value in scaler.items() if value is not None]
    return "\n".join(lines)


def _literal(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
