"""ColossalAI: the arguments of its plugins, which they hand on to its DynamicGradScaler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from distscale.convert.rule import DType, Reading, ScalingRule
from distscale.convert.sources import keyword_arguments, mapping
from distscale.convert.values import Keys, not_looked_at

__all__ = ["REASONS", "find", "hold", "read", "render"]

REASONS = {
    "mode": "ColossalAI has a scale in fp16 only",
    "growth_delay": "ColossalAI counts clean steps since the start, an overflow or a growth",
    "hysteresis_refill": "ColossalAI refills the hysteresis only when the scale grows",
    "at_floor": "ColossalAI never ends the run because of skips",
    "skips_nonfinite": "ColossalAI checks in fp16 always, elsewhere never",
    "max_norm": "ColossalAI clips or does not; set it if the source clips elsewhere",
}
_DTYPES: Mapping[str, DType] = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}
_PLUGINS = ("LowLevelZeroPlugin", "GeminiPlugin", "HybridParallelPlugin", "MoeHybridParallelPlugin")
_SCALE = (
    *("initial_scale", "min_scale", "max_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    *("precision", "max_norm"),
)


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The arguments of a plugin, or of any call or mapping with an ``initial_scale``."""
    found = keyword_arguments(text, where, _PLUGINS, ("initial_scale",))
    if found is None:
        found = mapping(text, where)
        found = found if found is not None and "initial_scale" in found else None
    return found


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads a plugin's arguments."""
    keys = Keys(values, where)
    notes = not_looked_at(name for name in values if name not in _SCALE)
    dtype = keys.choice("precision", "fp16", _DTYPES)
    clipping = keys.norm("max_norm", 0.0)
    if dtype != "fp16":
        return Reading(ScalingRule(dtype, "none", skips_nonfinite=False, max_norm=clipping).simplest(), notes)
    start = keys.scale("initial_scale", 2.0**16)
    floor, cap = keys.floor("min_scale", 1.0), keys.cap("max_scale", 2.0**32)
    keys.check_order("initial_scale", "min_scale", "max_scale", start, floor, cap)
    rule = ScalingRule(
        init_scale=start,
        growth_factor=keys.growth("growth_factor", 2.0),
        backoff_factor=keys.backoff("backoff_factor", 0.5),
        growth_interval=keys.count("growth_interval", 1000),
        hysteresis=max(keys.count("hysteresis", 2, low=0), 1),  # 0 backs off at each overflow, as 1 does
        min_scale=floor,
        max_scale=cap,
        max_norm=clipping,
    )
    return Reading(rule.simplest(), notes)


def hold(rule: ScalingRule) -> ScalingRule:
    """What ColossalAI can make of ``rule``."""
    rule = dataclasses.replace(
        rule,
        growth_delay=0,
        hysteresis_refill=None,
        at_floor="skip",
        skips_nonfinite=rule.dtype == "fp16",
        max_norm=0.0 if rule.max_norm == math.inf else rule.max_norm or 0.0,
    )
    return (rule if rule.dtype == "fp16" else dataclasses.replace(rule, mode="none")).simplest()


def render(rule: ScalingRule) -> str:
    """A plugin, of which any takes these arguments, for a rule that ColossalAI holds exactly."""
    words: dict[str, Any] = {}
    if rule.dtype == "fp16":
        # A scale that stays is one whose floor and cap are its start.
        fixed = rule.mode != "dynamic"
        words |= {
            "initial_scale": rule.init_scale,
            "min_scale": rule.init_scale if fixed else rule.min_scale,
            "max_scale": rule.init_scale if fixed else rule.max_scale,
            "growth_factor": rule.growth_factor,
            "backoff_factor": rule.backoff_factor,
            "growth_interval": rule.growth_interval,
            "hysteresis": rule.hysteresis,
        }
    words["max_norm"] = rule.max_norm
    lines = [f'precision="{rule.dtype}"', *(f"{name}={value!r}" for name, value in words.items())]
    return "LowLevelZeroPlugin(\n" + "".join(f"    {line},\n" for line in lines) + ")"
