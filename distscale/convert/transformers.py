"""Hugging Face's ``TrainingArguments``: JSON as ``to_json_string()`` writes it, YAML with its keys, or the call."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from distscale.convert import deepspeed
from distscale.convert.rule import REASONS_OF_TORCH, DType, Reading, ScalingRule
from distscale.convert.sources import keyword_arguments, mapping
from distscale.convert.values import Expression, Keys, not_looked_at
from distscale.errors import ConfigError

__all__ = ["REASONS", "find", "hold", "read", "render"]

_DEFAULT = "Trainer makes torch's scaler with its defaults, and no key of TrainingArguments changes them"
REASONS = {
    **REASONS_OF_TORCH,
    "mode": "Trainer has a dynamic scale in fp16, always, and none elsewhere",
    **dict.fromkeys(("init_scale", "growth_factor", "backoff_factor", "growth_interval"), _DEFAULT),
    "max_norm": "Trainer clips or does not; set it if the source clips elsewhere",
}
_CALLS = ("TrainingArguments", "Seq2SeqTrainingArguments")
_BACKENDS = ("half_precision_backend", "fp16_backend")
_OWN = (*_BACKENDS, "fp16_opt_level", "max_grad_norm", "per_device_train_batch_size")
_BESIDE = {
    "fsdp": "is about the engine: under FSDP the scale moves in the same way",
    "fp16_full_eval": "is about evaluation",
    "bf16_full_eval": "is about evaluation",
    "tf32": "is about products in fp32",
}
_WORDS = {word: word for word in ("auto", "apex", "amp", "cuda_amp", "cpu_amp")}
_LEVELS = {level: level for level in ("O0", "O1", "O2", "O3")}


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The arguments of the call, or the mapping, if one of its keys is of TrainingArguments alone."""
    found = keyword_arguments(text, where, _CALLS, ())
    if found is not None:
        return found
    found = mapping(text, where)
    if found is None:
        return None
    says_dtype = any(isinstance(found.get(dtype), bool) for dtype in ("fp16", "bf16"))  # DeepSpeed has blocks there
    return found if says_dtype or set(_OWN) & set(found) else None


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads the arguments for the engine that they choose: torch's scaler, apex's, or DeepSpeed."""
    keys = Keys({key: value for key, value in values.items() if value is not None or key == "max_grad_norm"}, where)
    looked_at = ("fp16", "bf16", "deepspeed", *_OWN[:-1], *_BESIDE)
    notes = [f"{key} {why}: it was not converted" for key, why in _BESIDE.items() if values.get(key)]
    notes += not_looked_at(name for name in values if name not in looked_at)
    fp16, bf16 = keys.flag("fp16", False), keys.flag("bf16", False)
    if fp16 and bf16:
        raise ConfigError(f"{where}: fp16 and bf16 are both true; Transformers takes one of them")
    unpacked = [name for name in values if str(name).startswith("**")]  # YAML has keys that are numbers
    if unpacked and not (fp16 or bf16 or {"fp16", "bf16"} <= set(values)):
        raise ConfigError(
            f"{where}: fp16 or bf16 may be in {' or '.join(unpacked)}, which is not run and cannot be read; write both "
            "as arguments of their own"
        )
    if bf16 and _backend(keys) == "apex":
        raise ConfigError(
            f"{where}: bf16 is true and the backend is apex, which has fp16 only; Transformers refuses both"
        )
    if values.get("deepspeed"):
        filled = _filled(_section(keys, values["deepspeed"], where), keys, where)
        rule, more = deepspeed.read(filled, f"{where}: deepspeed", whole=True)
        return Reading(rule, [*notes, *more])
    if "max_grad_norm" not in keys:
        notes.append("max_grad_norm is not there: Trainer clips at 1.0")
    clipping = keys.norm("max_grad_norm", 1.0)
    rule = ScalingRule() if fp16 else ScalingRule("bf16" if bf16 else "fp32", "none", skips_nonfinite=False)
    if fp16 and _backend(keys) == "apex":
        rule = _of_apex(keys)
        notes.append("the backend is apex, whose scaler Transformers 5 and apex itself no longer have")
    elif "fp16_opt_level" in keys and values["fp16_opt_level"] != "O1":
        notes.append("fp16_opt_level counts in fp16 with apex only: it was not converted")
    return Reading(dataclasses.replace(rule, max_norm=clipping).simplest(), notes)


def _backend(keys: Keys) -> str:
    """The old key counts before the new one, unless it is ``"auto"``."""
    new, old = (keys.choice(key, "auto", _WORDS) for key in _BACKENDS)
    return new if old == "auto" else old


def _of_apex(keys: Keys) -> ScalingRule:
    """The scaler of ``apex.amp`` by its defaults, which has a cap; O0 is fp32, and O3 has the scale 1 and no check."""
    level = keys.choice("fp16_opt_level", "O1", _LEVELS)
    if level in ("O0", "O3"):
        dtype: DType = "fp32" if level == "O0" else "fp16"
        return ScalingRule(dtype, "none", skips_nonfinite=False)
    return ScalingRule(max_scale=2.0**24)


def _section(keys: Keys, engine: object, where: str) -> Mapping[str, Any]:
    """DeepSpeed's JSON, which may be there as text."""
    if isinstance(engine, Mapping):
        return engine
    if isinstance(engine, Expression) or not isinstance(engine, str):
        raise keys.fail("deepspeed", "a section, or the name of a file")
    if not engine.lstrip().startswith("{"):
        raise ConfigError(f"{where}: the scale is in the file that deepspeed names; convert that file, {engine}")
    try:
        section: Mapping[str, Any] = _typed(json.loads(engine))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: deepspeed is not valid JSON: {error}") from None
    return section


def _typed(value: Any) -> Any:
    """Words and digits in a JSON that is there as text, as Transformers takes them: ``"true"``, ``"8"``, ``"0.5"``."""
    if isinstance(value, Mapping):
        return {key: _typed(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdecimal():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdecimal() else value


def _filled(engine: Mapping[str, Any], keys: Keys, where: str) -> Mapping[str, Any]:
    """DeepSpeed's JSON as Transformers completes it, which refuses what contradicts its own arguments."""
    if (keys.flag("fp16", False) or keys.flag("fp16_full_eval", False)) and _backend(keys) == "apex":
        raise ConfigError(
            f"{where}: the backend is apex, and deepspeed is there, but DeepSpeed 0.19.8 no longer has apex's scale, "
            "its block amp; take the backend auto, with which the scale is DeepSpeed's own"
        )
    filled = dict(engine)
    for dtype in ("fp16", "bf16"):
        asked = keys.flag(dtype, False) or keys.flag(f"{dtype}_full_eval", False)
        block = filled.get(dtype, {"enabled": "auto"} if asked else {})
        said = Keys(block, where, f"deepspeed.{dtype}.")
        if said.is_auto("enabled"):
            block = {**block, "enabled": asked}
        elif "enabled" in said and said.flag("enabled", False) != asked:
            raise ConfigError(
                f"{where}: deepspeed.{dtype}.enabled = {block['enabled']} contradicts {dtype} = {asked}; Transformers "
                'takes "auto" there'
            )
        if block:
            filled[dtype] = block
    clipping = keys.norm("max_grad_norm", 1.0)
    if filled.get("gradient_clipping") == "auto":
        filled["gradient_clipping"] = clipping
    elif filled.get("gradient_clipping") not in (None, clipping):
        raise ConfigError(
            f"{where}: deepspeed.gradient_clipping = {filled['gradient_clipping']!r} contradicts max_grad_norm = "
            f'{clipping}; Transformers takes "auto" there'
        )
    return filled


def hold(rule: ScalingRule) -> ScalingRule:
    """What Trainer can make of ``rule``."""
    clipping = 0.0 if rule.max_norm in (None, math.inf) else rule.max_norm
    if rule.dtype == "fp16":
        return ScalingRule(max_norm=clipping)
    return ScalingRule(rule.dtype, "none", skips_nonfinite=False, max_norm=clipping).simplest()


def render(rule: ScalingRule) -> str:
    """The keys, for a rule that Trainer holds exactly."""
    keys = {"fp16": rule.dtype == "fp16", "bf16": rule.dtype == "bf16", "max_grad_norm": rule.max_norm}
    return json.dumps(keys, indent=2)
