"""Megatron's arguments, as words of a command line or somewhere in a shell script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from distscale.convert import mcore
from distscale.convert.rule import DType, Reading, ScalingRule
from distscale.convert.sources import arguments
from distscale.convert.values import Keys, not_looked_at
from distscale.errors import ConfigError

__all__ = ["REASONS", "find", "hold", "read", "render"]

REASONS = mcore.REASONS
hold = mcore.hold
_DTYPES: tuple[DType, ...] = ("fp16", "bf16")
_KNOWN = (
    *_DTYPES,
    *("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"),
    "clip-grad",
)


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The arguments, if one is Megatron's."""
    found = arguments(text, _DTYPES)
    return found if set(found) & set(_KNOWN) else None


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads arguments by name, without their dashes."""
    notes = not_looked_at(f"--{name}" for name in values if name not in _KNOWN)
    keys = Keys(values, where, "--")
    asked = [dtype for dtype in _DTYPES if dtype in keys]
    if len(asked) > 1:
        raise ConfigError(f"{where}: --fp16 and --bf16 are both there; Megatron takes one of them")
    rule = mcore.read(keys, asked[0] if asked else "fp32", prefix="", joint="-")
    if not asked:
        notes.append(
            "neither --fp16 nor --bf16 is there: that is fp32, where Megatron has no scale, whatever else is said"
        )
    elif asked == ["bf16"] and "loss-scale" not in keys:
        notes.append("--bf16 without --loss-scale: Megatron has no scaler, and skips no step")
    clipping = keys.norm("clip-grad", None)
    if clipping is None and set(values) - set(_KNOWN):
        notes.append("--clip-grad is not there: Megatron clips at 1.0")
        clipping = 1.0
    return Reading(dataclasses.replace(rule, max_norm=clipping), notes)


def render(rule: ScalingRule) -> str:
    """The arguments, for a rule that Megatron holds exactly."""
    words = [f"--{rule.dtype}"] if rule.dtype != "fp32" else []
    words += [f"--{name.replace('_', '-')} {value!r}" for name, value in mcore.values(rule).items()]
    if rule.max_norm is not None:
        words.append(f"--clip-grad {rule.max_norm!r}")
    return " \\\n".join(words)
