"""NeMo 2: the arguments ``fp16_*`` of the plugin ``MegatronMixedPrecision``, in Python or as a mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from distscale.convert import mcore
from distscale.convert.nemo import PRECISIONS, WORDS
from distscale.convert.rule import Reading, ScalingRule
from distscale.convert.sources import keyword_arguments, mapping
from distscale.convert.values import Keys, not_looked_at

__all__ = ["REASONS", "find", "hold", "read", "render"]

REASONS = dict(mcore.REASONS, max_norm="NeMo 2 clips by clip_grad of OptimizerConfig: set it there")
_SCALE = tuple(
    f"fp16_{name}" for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
)


def find(text: str, where: str) -> Mapping[str, Any] | None:
    """The plugin's arguments, if the text has some."""
    found = keyword_arguments(text, where, ("MegatronMixedPrecision",), _SCALE)
    if found is not None:
        return found
    found = mapping(text, where)
    return found if found is not None and set(found) & set(_SCALE) else None


def read(values: Mapping[str, Any], where: str) -> Reading:
    """Reads the plugin's arguments."""
    keys = Keys(values, where)
    notes = not_looked_at(name for name in values if name not in (*_SCALE, "precision"))
    if "precision" not in keys:
        notes.append("precision is not there; converted as fp16, where alone a dynamic scale counts")
    given = Keys({name: value for name, value in values.items() if value is not None}, where)
    rule = mcore.read(given, keys.choice("precision", "16-mixed", PRECISIONS), prefix="fp16_", joint="_")
    return Reading(rule, [*notes, "clipping is in OptimizerConfig(clip_grad=...), 1.0 by default: it was not read"])


def hold(rule: ScalingRule) -> ScalingRule:
    """What NeMo 2's plugin can make of ``rule``."""
    return dataclasses.replace(mcore.hold(rule), max_norm=None)


def render(rule: ScalingRule) -> str:
    """The call, for a rule that NeMo 2 holds exactly."""
    words = [f'precision="{WORDS[rule.dtype]}"']
    words += [f"fp16_{name}={value!r}" for name, value in mcore.values(rule).items()]
    return "MegatronMixedPrecision(\n" + "".join(f"    {word},\n" for word in words) + ")"
