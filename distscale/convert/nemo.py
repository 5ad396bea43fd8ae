"""NeMo 1: ``native_amp_*`` and ``hysteresis`` of the model, ``precision`` of the trainer, in YAML."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from distscale.convert.rule import DType, Reading, ScalingRule
from distscale.convert.sources import mapping
from distscale.convert.values import Keys
from distscale.policy import MAX_COUNT

__all__ = ["PRECISIONS", "REASONS", "WORDS", "find", "hold", "read", "render"]

PRECISIONS: Mapping[str, DType] = {
    **dict[str, DType].fromkeys(("16", "fp16", "16-mixed", "fp16-mixed"), "fp16"),
    **dict[str, DType].fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict[str, DType].fromkeys(("32", "fp32", "32-true"), "fp32"),
}
WORDS = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32"}

REASONS = {
    "mode": "NeMo 1 has a dynamic scale in fp16 and none elsewhere: in fp16 it is written to grow after 2^31 - 1 clean "
    "steps, but an overflow still halves it",
    "growth_factor": "NeMo 1 doubles",
    "backoff_factor": "NeMo 1 halves",
    "growth_delay": "NeMo 1 counts clean steps since the start, an overflow or a growth",
    "hysteresis_refill": "NeMo 1 refills the hysteresis on each clean step",
    "min_scale": "NeMo 1 has no floor",
    "max_scale": "NeMo 1 has no cap",
    "at_floor": "NeMo 1 has no floor, and never ends the run because of skips",
    "skips_nonfinite": "NeMo 1 checks in fp16 always, elsewhere never",
    "max_norm": "NeMo 1 clips, or does not",
}
_KNOWN = ("native_amp_init_scale", "native_amp_growth_interval")


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The YAML, if it has a key of NeMo 1's, or a trainer without a scale, which need not have one."""
    values = mapping(text, where)
    if values is None:
        return None
    model, trainer = values.get("model", values), values.get("trainer", {})
    if isinstance(model, Mapping) and set(_KNOWN) & set(model):
        return values
    precision = str(trainer.get("precision")) if isinstance(trainer, Mapping) else ""
    return values if PRECISIONS.get(precision, "fp16") != "fp16" else None


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads ``trainer`` and ``model``, or their keys on the top level."""
    notes: list[str] = []
    sections = "model" in values or "trainer" in values
    model = Keys(values.get("model", {}) if sections else values, where, "model." if sections else "")
    trainer = Keys(values.get("trainer", {}) if sections else values, where, "trainer." if sections else "")
    if "precision" not in trainer:
        notes.append("trainer.precision is not there; converted as fp16, where alone native_amp_* count")
    dtype = trainer.choice("precision", "16", PRECISIONS)
    clipping = trainer.norm("gradient_clip_val", None)
    if dtype != "fp16":
        return Reading(ScalingRule(dtype, "none", skips_nonfinite=False, max_norm=clipping).simplest(), notes)
    rule = ScalingRule(
        init_scale=model.scale("native_amp_init_scale", 2.0**32),
        growth_interval=model.count("native_amp_growth_interval", 1000),
        hysteresis=model.count("hysteresis", 2),
        hysteresis_refill=1,
        max_norm=clipping,
    )
    return Reading(rule.simplest(), notes)


def hold(rule: ScalingRule) -> ScalingRule:
    """What NeMo 1 can make of ``rule``."""
    clipping = 0.0 if rule.max_norm == math.inf else rule.max_norm
    if rule.dtype != "fp16":
        return ScalingRule(rule.dtype, "none", skips_nonfinite=False, max_norm=clipping).simplest()
    if rule.mode != "dynamic":
        return ScalingRule(init_scale=rule.init_scale, growth_interval=MAX_COUNT, max_norm=clipping)
    return dataclasses.replace(
        rule,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_delay=0,
        hysteresis_refill=1,
        min_scale=None,
        max_scale=None,
        at_floor="skip",
        max_norm=clipping,
    ).simplest()


def render(rule: ScalingRule) -> str:
    """The two sections, for a rule that NeMo 1 holds exactly."""
    lines = ["trainer:", f"  precision: {WORDS[rule.dtype]}"]
    if rule.max_norm is not None:
        lines.append(f"  gradient_clip_val: {_number(rule.max_norm)}")
    if rule.mode == "dynamic":
        lines += [
            "model:",
            f"  native_amp_init_scale: {_number(rule.init_scale)}",
            f"  native_amp_growth_interval: {rule.growth_interval}",
            f"  hysteresis: {rule.hysteresis}",
        ]
    return "\n".join(lines)


def _number(value: float) -> str:
    """A float that YAML 1.1 takes for one: it needs a point before the exponent."""
    digits, exponent, power = repr(value).partition("e")
    return digits + ("" if "." in digits else ".0") + exponent + power
