"""The scaler of Megatron-core, which Megatron's arguments and NeMo 2's plugin configure under different names."""

from __future__ import annotations

import dataclasses
import math

from distscale.convert.rule import DType, ScalingRule
from distscale.convert.values import Keys
from distscale.policy import MIN_SCALE

__all__ = ["REASONS", "hold", "read", "values"]

REASONS = {
    "mode": "Megatron-core has a dynamic scale in fp16 only, and none in fp32",
    "growth_factor": "Megatron-core doubles",
    "backoff_factor": "Megatron-core halves",
    "growth_delay": "Megatron-core counts clean steps since the start, an overflow or a growth",
    "hysteresis_refill": "Megatron-core refills the hysteresis only when the scale grows",
    "max_scale": "Megatron-core has no cap",
    "at_floor": "Megatron-core never ends the run because of skips",
    "skips_nonfinite": "Megatron-core checks where it has a scale: in fp16 always, in bf16 with a loss_scale",
    "max_norm": "Megatron-core clips, or measures without clipping at 0",
}


def read(keys: Keys, dtype: DType, *, prefix: str, joint: str) -> ScalingRule:
    """The rule of Megatron-core's optimizer for these settings.

    Args:
        keys: the settings.
        dtype: of the model.
        prefix: of their names.
        joint: between the words of their names.
    """

    def name(words: str) -> str:
        return prefix + words.replace("_", joint)

    static = keys.number(name("loss_scale"), 0, lambda x: 0 <= x < math.inf, "a number of at least 0 (0: dynamic)")
    if static and dtype != "fp32":
        return ScalingRule(dtype, "static", keys.scale(name("loss_scale"), 0)).simplest()
    if dtype != "fp16":
        return ScalingRule(dtype, "none", skips_nonfinite=False).simplest()
    start = keys.scale(name("initial_loss_scale"), 2.0**32)
    floor = keys.floor(name("min_loss_scale"), 1.0)
    keys.check_order(name("initial_loss_scale"), name("min_loss_scale"), "", start, floor, None)
    return ScalingRule(
        init_scale=start,
        growth_interval=keys.count(name("loss_scale_window"), 1000),
        hysteresis=keys.count(name("hysteresis"), 2),
        min_scale=floor,
    ).simplest()


def hold(rule: ScalingRule) -> ScalingRule:
    """What Megatron-core can make of ``rule``."""
    rule = dataclasses.replace(rule, at_floor="skip", max_norm=0.0 if rule.max_norm == math.inf else rule.max_norm)
    if rule.dtype == "fp32" or (rule.mode == "dynamic" and rule.dtype == "bf16"):
        return dataclasses.replace(rule, mode="none", skips_nonfinite=False).simplest()
    if rule.mode != "dynamic":
        return dataclasses.replace(rule, skips_nonfinite=rule.skips_nonfinite or rule.dtype == "fp16").simplest()
    return dataclasses.replace(
        rule,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_delay=0,
        hysteresis_refill=None,
        max_scale=None,
    ).simplest()


def values(rule: ScalingRule) -> dict[str, int | float]:
    """The settings for a rule that Megatron-core holds exactly, under the names of its ``OptimizerConfig``."""
    if rule.mode == "dynamic":
        return {
            "initial_loss_scale": rule.init_scale,
            "min_loss_scale": rule.min_scale or MIN_SCALE,  # above 0, as Megatron-core demands
            "loss_scale_window": rule.growth_interval,
            "hysteresis": rule.hysteresis,
        }
    # A constant scale of 1 is what makes Megatron-core check gradients that it need not scale.
    return {"loss_scale": rule.init_scale} if rule.skips_nonfinite else {}
