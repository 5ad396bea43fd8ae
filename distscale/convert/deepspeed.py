"""DeepSpeed's JSON: its blocks ``fp16``, ``bf16`` and ``gradient_clipping``, as DeepSpeed 0.19.8 understands them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from distscale.convert.rule import DType, Reading, ScalingRule
from distscale.convert.sources import mapping
from distscale.convert.values import Keys, not_looked_at
from distscale.errors import ConfigError

__all__ = ["REASONS", "find", "hold", "read", "render"]

REASONS = {
    "mode": "DeepSpeed has a loss scale in fp16 only",
    "init_scale": "DeepSpeed starts at a power of two, at or above its floor",
    "growth_factor": "DeepSpeed doubles",
    "backoff_factor": "DeepSpeed halves",
    "growth_delay": "DeepSpeed grows first after loss_scale_window + 1 clean steps since the start or an overflow",
    "hysteresis_refill": "DeepSpeed refills on a growth or on any clean step (consecutive_hysteresis)",
    "min_scale": "DeepSpeed's floor is a whole number of at least 1",
    "max_scale": "DeepSpeed has no cap",
    "at_floor": "DeepSpeed ends the run at the first overflow at the floor of a dynamic scale, and only there",
    "max_consecutive_skips": "DeepSpeed does not count, but ends the run at the first overflow at the floor",
    "skips_nonfinite": "DeepSpeed checks in fp16 always, in fp32 never",
    "max_norm": "DeepSpeed clips, or measures without clipping at 0",
}
_FP16 = (
    *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis"),
    *("consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"),
)
_BF16 = (
    *("enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"),
    "bf16_optimizer_states",
)
_PRECISION = ("fp16", "bf16", "bfloat16", "gradient_clipping")
_LOOKED_AT = ("zero_optimization", "torch_autocast", "distscale")
_OTHER = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The JSON, if it has a block of DeepSpeed's."""
    values = mapping(text, where)
    blocks = ("fp16", "bf16", "bfloat16")
    if values is None or not (any(isinstance(values.get(key), Mapping) for key in blocks) or set(_OTHER) & set(values)):
        return None
    return values


def read(values: Mapping[str, Any], where: str, whole: bool = False) -> Reading:
    """Reads the JSON, or those blocks alone, as which it counts if it has no other key and is not said to be whole."""
    whole = whole or bool(set(values) - set(_PRECISION))
    notes: list[str] = []
    fp16 = _block(values, "fp16", _FP16, where, notes)
    old = "bf16" not in values and "bfloat16" in values
    bf16 = _block(values, "bfloat16" if old else "bf16", _BF16, where, notes)
    dtype = _dtype(fp16, bf16, where, notes)
    if Keys(values.get("torch_autocast", {}), where, "torch_autocast.").flag("enabled", False):
        raise ConfigError(
            f"{where}: torch_autocast.enabled is true: DeepSpeed then scales by torch.amp.GradScaler's defaults, which "
            "no key changes; convert GradScalerKwargs() with --from accelerate instead"
        )
    clipping = _clipping(values, where, whole, notes)
    if "distscale" in values:
        notes.append('the block "distscale" was not converted: it is for the engine, and goes before fp16 there')
    notes += not_looked_at(key for key in values if key not in (*_PRECISION, *_LOOKED_AT))
    if dtype != "fp16":
        checks = dtype == "bf16" and bf16.flag("check_grad_overflow", True)
        if dtype == "bf16" and not checks:
            notes.append("bf16.check_grad_overflow = false: DeepSpeed 0.19.8 heeds it in ZeRO 1 and 2 only")
        rule = ScalingRule(dtype, "none", skips_nonfinite=checks, max_norm=clipping)
        return Reading(rule.simplest(), notes)
    static = fp16.number("loss_scale", 0, lambda x: 0 <= x < math.inf, "a number of at least 0 (0: dynamic)")
    if static:
        scale = fp16.scale("loss_scale", 0)
        return Reading(ScalingRule(mode="static", init_scale=scale, max_norm=clipping).simplest(), notes)
    return Reading(
        dataclasses.replace(_dynamic(fp16, notes), max_norm=clipping).simplest(),
        notes + (_at_stage_0(values) if whole else []),
    )


def _dynamic(fp16: Keys, notes: list[str]) -> ScalingRule:
    start = 2.0 ** fp16.count("initial_scale_power", 16, 0, 126)
    floor = fp16.floor("min_loss_scale", 1.0)
    if floor is None or floor != int(floor):
        notes.append("fp16.min_loss_scale is no whole number of at least 1: DeepSpeed 0.19.8 refuses it")
    fp16.check_order("fp16.initial_scale_power", "min_loss_scale", "", start, floor, None)
    return ScalingRule(
        init_scale=start,
        growth_interval=fp16.count("loss_scale_window", 1000),
        growth_delay=1,
        hysteresis=fp16.count("hysteresis", 2),
        hysteresis_refill=1 if fp16.flag("consecutive_hysteresis", False) else None,
        min_scale=floor,
        at_floor="raise",
    )


def _block(values: Mapping[str, Any], name: str, known: tuple[str, ...], where: str, notes: list[str]) -> Keys:
    """A block without its ``"auto"``s, which DeepSpeed takes as its defaults."""
    keys = Keys(values.get(name, {}), where, f"{name}.")
    keys.refuse_unknown(known)
    block: Mapping[str, Any] = values.get(name, {})
    automatic = [key for key, value in block.items() if value == "auto" and key != "enabled"]
    if automatic:
        notes.append(f'{name}: "auto" is DeepSpeed\'s default in {", ".join(automatic)}')
    for key in ("auto_cast", "fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if block.get(key) is True:
            notes.append(
                f"{name}.{key} = true is about the engine, not the scale: carry it over by hand if it is wanted"
            )
    return Keys({key: value for key, value in block.items() if key not in automatic}, where, f"{name}.")


def _dtype(fp16: Keys, bf16: Keys, where: str, notes: list[str]) -> DType:
    """The one that is enabled; else the first that Transformers may enable."""
    blocks: dict[DType, Keys] = {"fp16": fp16, "bf16": bf16}
    asked = {name: None if block.is_auto("enabled") else block.flag("enabled", False) for name, block in blocks.items()}
    if all(asked.values()):
        raise ConfigError(f"{where}: fp16.enabled and bf16.enabled are both true; DeepSpeed takes one of them")
    for name, enabled in asked.items():
        if enabled:
            return name
    for name, enabled in asked.items():
        if enabled is None:
            notes.append(f'{name}.enabled is "auto": Transformers decides by its own --{name}; converted as {name}')
            return name
    return "fp32"


def _clipping(values: Mapping[str, Any], where: str, whole: bool, notes: list[str]) -> float | None:
    if values.get("gradient_clipping") == "auto":
        notes.append('gradient_clipping is "auto": Transformers puts its max_grad_norm there (1.0 by default)')
        return None
    if "gradient_clipping" not in values and whole:
        notes.append("gradient_clipping is not there: DeepSpeed clips at 1.0 (from 0.19.3 on; before it did not clip)")
        return 1.0
    return Keys(values, where).norm("gradient_clipping", None)


def _at_stage_0(values: Mapping[str, Any]) -> list[str]:
    zero = values.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(bool(zero))
    if stage != 0:
        return []
    return [
        "zero_optimization.stage is 0: there DeepSpeed 0.19.8 backs off at each overflow, whatever fp16.hysteresis is, "
        "and never ends the run at the floor; converted as written"
    ]


def hold(rule: ScalingRule) -> ScalingRule:
    """What DeepSpeed can make of ``rule``."""
    clipping = 0.0 if rule.max_norm == math.inf else rule.max_norm
    if rule.dtype != "fp16":
        checks = rule.dtype == "bf16" and (rule.mode != "none" or rule.skips_nonfinite)
        return ScalingRule(rule.dtype, "none", skips_nonfinite=checks, max_norm=clipping).simplest()
    if rule.mode != "dynamic":
        return ScalingRule("fp16", rule.mode, rule.init_scale, max_norm=clipping).simplest()
    floor = float(min(max(1, math.floor(rule.min_scale or 1)), 2**126))
    start = 2.0 ** max(math.floor(math.log2(rule.init_scale)), math.ceil(math.log2(floor)))
    return dataclasses.replace(
        rule,
        init_scale=start,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_delay=1,
        hysteresis_refill=None if rule.hysteresis_refill is None else 1,
        min_scale=floor,
        max_scale=None,
        at_floor="raise",
        max_consecutive_skips=None,
        max_norm=clipping,
    ).simplest()


def render(rule: ScalingRule) -> str:
    """The blocks, for a rule that DeepSpeed holds exactly."""
    blocks: dict[str, Any] = {}
    if rule.dtype == "fp16":
        blocks["fp16"] = {"enabled": True, "loss_scale": 0 if rule.mode == "dynamic" else rule.init_scale}
        if rule.mode == "dynamic":
            blocks["fp16"] |= {
                "initial_scale_power": int(math.log2(rule.init_scale)),
                "loss_scale_window": rule.growth_interval,
                "hysteresis": rule.hysteresis,
                "consecutive_hysteresis": rule.hysteresis_refill is not None,
                "min_loss_scale": int(rule.min_scale or 1),
            }
    elif rule.dtype == "bf16":
        blocks["bf16"] = {"enabled": True, "check_grad_overflow": rule.skips_nonfinite}
    else:
        blocks |= {"fp16": {"enabled": False}, "bf16": {"enabled": False}}
    if rule.max_norm is not None:
        blocks["gradient_clipping"] = rule.max_norm
    return json.dumps(blocks, indent=2)
