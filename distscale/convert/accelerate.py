"""Hugging Face: ``GradScalerKwargs`` and ``Accelerator`` in Python, and the YAML of ``accelerate config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from distscale.convert import deepspeed, mcore
from distscale.convert.rule import REASONS_OF_TORCH, DType, Reading, ScalingRule
from distscale.convert.sources import keyword_arguments, mapping
from distscale.convert.values import Keys, not_looked_at
from distscale.errors import ConfigError
from distscale.policy import MAX_COUNT

__all__ = ["REASONS", "find", "hold", "read", "render"]

REASONS = {
    **REASONS_OF_TORCH,
    "mode": "Accelerate has a dynamic scale in fp16 and none elsewhere: in fp16 it is written to grow after 2^31 - 1 "
    "clean steps, but an overflow still halves it",
    "max_norm": "Accelerate clips where the script calls accelerator.clip_grad_norm_(parameters, max_norm)",
}
_DTYPES: Mapping[str, DType] = {"fp16": "fp16", "bf16": "bf16", "no": "fp32"}
_WORDS = {"fp16": "fp16", "bf16": "bf16", "fp32": "no"}
_SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_CONFIG = ("compute_environment", "distributed_type", "mixed_precision")


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The arguments of a scaler and of Accelerator, or the mapping of either or of ``accelerate config``."""
    scaler = keyword_arguments(text, where, ("GradScalerKwargs", "GradScaler", "ShardedGradScaler"), ())
    engine = keyword_arguments(text, where, ("Accelerator",), ())
    if scaler is not None or engine is not None:
        return {**(engine or {}), **(scaler or {})}
    found = mapping(text, where)
    return found if found is not None and set(found) & {*_CONFIG, "init_scale"} else None


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads the arguments or the configuration, for the engine that it chooses."""
    if values.get("mixed_precision") is False:  # YAML's reading of a plain no
        values = {**values, "mixed_precision": "no"}
    keys = Keys(values, where)
    engine = str(values.get("distributed_type", "NO"))
    if engine == "DEEPSPEED":
        return _of_deepspeed(values, where)
    if values.get("mixed_precision") == "fp8":
        raise keys.fail("mixed_precision", "fp16, bf16 or no: FP8 has scales of its own, which are not converted")
    notes = not_looked_at(name for name in values if name not in (*_SCALER, *_CONFIG, "kwargs_handlers"))
    if "mixed_precision" not in keys:
        notes.append("mixed_precision is not there; converted as fp16, where alone a scaler counts")
    dtype = keys.choice("mixed_precision", "fp16", _DTYPES)
    if engine == "MEGATRON_LM":
        part = Keys(values.get("megatron_lm_config") or {}, where, "megatron_lm_config.")
        rule = mcore.read(Keys({}, where), dtype, prefix="", joint="_")
        clipping = part.norm("megatron_lm_gradient_clipping", 1.0)
        return Reading(dataclasses.replace(rule, max_norm=clipping), [*notes, "the scale is Megatron's default"])
    if dtype != "fp16":
        return Reading(ScalingRule(dtype, "none", skips_nonfinite=False).simplest(), notes)
    if not keys.flag("enabled", True):
        return Reading(ScalingRule(mode="none", skips_nonfinite=False).simplest(), notes)
    if not set(_SCALER) & set(values):
        notes.append("the scale is the default of torch.amp.GradScaler, unless the script passes GradScalerKwargs")
    rule = ScalingRule(
        init_scale=keys.scale("init_scale", 2.0**16),
        growth_factor=keys.growth("growth_factor", 2.0),
        backoff_factor=keys.backoff("backoff_factor", 0.5),
        growth_interval=keys.count("growth_interval", 2000),
    )
    return Reading(rule.simplest(), notes)


def _of_deepspeed(values: Mapping[str, Any], where: str) -> Reading:
    """Without a file of its own DeepSpeed has its defaults."""
    engine: Mapping[str, Any] = values.get("deepspeed_config") or {}
    file = Keys(engine, where, "deepspeed_config.")
    if "deepspeed_config_file" in file:
        name = engine["deepspeed_config_file"]
        raise ConfigError(f"{where}: the scale is in deepspeed_config.deepspeed_config_file; convert that file, {name}")
    dtype = Keys(values, where).choice("mixed_precision", "no", _DTYPES)
    blocks: dict[str, Any] = {dtype: {"enabled": True}} if dtype != "fp32" else {}
    rule, notes = deepspeed.read(blocks, where)
    if dtype == "fp16":
        notes = [*notes, "the scale is DeepSpeed's default"]
    return Reading(dataclasses.replace(rule, max_norm=file.norm("gradient_clipping", None)), notes)


def hold(rule: ScalingRule) -> ScalingRule:
    """What Accelerate with torch's scaler can make of ``rule``."""
    if rule.dtype != "fp16" or not rule.skips_nonfinite:
        return ScalingRule(rule.dtype, "none", skips_nonfinite=False).simplest()
    if rule.mode != "dynamic":
        return ScalingRule(init_scale=rule.init_scale, growth_interval=MAX_COUNT)
    return ScalingRule(
        init_scale=rule.init_scale,
        growth_factor=rule.growth_factor,
        backoff_factor=rule.backoff_factor,
        growth_interval=rule.growth_interval,
    )


def render(rule: ScalingRule) -> str:
    """The call that makes the accelerator, for a rule that torch's scaler holds exactly."""
    words = [f'mixed_precision="{_WORDS[rule.dtype]}"']
    if rule.mode == "dynamic":
        values = {name: getattr(rule, name) for name in _SCALER[:-1]}
        words.append(f"kwargs_handlers=[GradScalerKwargs({', '.join(f'{name}={values[name]!r}' for name in values)})]")
    elif rule.dtype == "fp16":
        words.append("kwargs_handlers=[GradScalerKwargs(enabled=False)]")
    return "Accelerator(\n" + "".join(f"    {word},\n" for word in words) + ")"
