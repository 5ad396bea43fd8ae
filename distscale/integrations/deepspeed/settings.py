"""What a DeepSpeed configuration asks for, and what is handed on to DeepSpeed itself. Pure functions.

The ``fp16`` block means here what it means to DeepSpeed; the ``distscale`` block, which DeepSpeed must not see, says
what else is wanted. Both are checked before any work starts.
"""

from __future__ import annotations

import base64
import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from distscale.arguments import make_policy
from distscale.errors import ConfigError
from distscale.lenient_json import parse_json
from distscale.policy import (
    MAX_SCALE,
    MIN_SCALE,
    REFILL_FOR_ANY_CLEAN_STEP,
    DynamicScale,
    NoScaling,
    Policy,
    StaticScale,
    is_number,
)
from distscale.record import StepReport
from distscale.reducers import Reducer

__all__ = ["BLOCK", "Settings", "read_config", "settings_of", "split_block"]

_log = logging.getLogger("distscale")

BLOCK = "distscale"
"""Name of our block in DeepSpeed's configuration."""
_RULE = tuple(field.name for field in fields(DynamicScale))
_FP16_DEFAULTS: dict[str, Any] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}


@dataclass(frozen=True)
class Settings:
    """How a DeepSpeed engine is coordinated."""

    policy: Policy
    max_consecutive_skips: int | None = 100
    """As in :class:`~distscale.DistributedGradScaler`."""
    deepspeed_check: bool = False
    """Keep DeepSpeed's own overflow check and norm, also where ours could take their place."""
    on_step: Callable[[StepReport], None] | None = None
    reducer: Reducer | None = None


_BLOCK_KEYS = (*_RULE, "policy", "max_consecutive_skips", "deepspeed_check")
_CODE_KEYS = ("on_step", "reducer")


def read_config(config: Any) -> dict[str, Any]:
    """The configuration as a dict of its own, from all that DeepSpeed takes for one.

    Args:
        config: a mapping, the path of a file of JSON or Hjson (with comments), or its text in base64.

    Raises:
        ConfigError: if there is no such file, or it cannot be understood, naming the place.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, str | Path):
        raise ConfigError(f"the DeepSpeed config is a {type(config).__name__}; it must be a dict or a path of JSON")
    path = Path(config)
    try:
        decoded = None if os.path.exists(config) else _decoded(str(config))
        text = path.read_text(encoding="utf-8") if decoded is None else decoded
    except OSError as error:
        raise ConfigError(f"the DeepSpeed config {path} cannot be read: {error.strerror}") from None
    try:
        read = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed config {path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"the DeepSpeed config {path} holds a {type(read).__name__}, not an object")
    return read


def _decoded(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except ValueError:
        return None


def split_block(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes our block out of a configuration.

    Returns:
        What DeepSpeed is to see, and the block. A ``min_loss_scale`` below 1, which DeepSpeed refuses, is for us alone.

    Raises:
        ConfigError: if the block is not an object, or has an unknown key.
    """
    rest = dict(config)
    block = rest.pop(BLOCK, {})
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{BLOCK}" in the DeepSpeed config is {block!r}; it must be an object')
    _check_keys(block, _BLOCK_KEYS, f'the "{BLOCK}" block of the DeepSpeed config')
    fp16 = rest.get("fp16")
    if isinstance(fp16, Mapping) and is_number(fp16.get("min_loss_scale")):
        rest["fp16"] = {**fp16, "min_loss_scale": max(1, int(fp16["min_loss_scale"]))}
    return rest, dict(block)


def settings_of(fp16: Mapping[str, Any], uses_fp16: bool, overrides: Mapping[str, Any]) -> Settings:
    """What the ``fp16`` block and the overrides ask for together.

    Args:
        fp16: DeepSpeed's block; keys that it lacks have DeepSpeed's defaults.
        uses_fp16: False for BF16 and FP32, whose gradients carry no scale.
        overrides: our block, or the arguments of ``coordinate``: ``policy`` ("dynamic", "static", "none" or an object),
            every argument of :class:`~distscale.DynamicScale`, and the other fields of :class:`Settings`.

    Raises:
        ConfigError: for an unknown key or a value outside its range, naming both.
    """
    _check_keys(overrides, (*_BLOCK_KEYS, *_CODE_KEYS), "coordinate()")
    rule = {key: overrides[key] for key in _RULE if key in overrides}
    given = {key: value for key, value in overrides.items() if key not in (*_RULE, "policy")}
    wanted = overrides.get("policy")
    if not uses_fp16:
        if rule or wanted not in (None, NoScaling.name, NoScaling()):
            raise ConfigError(
                f"{', '.join([*rule, *(['policy'] if wanted else [])])} has no meaning without fp16: "
                "the gradients carry no scale, and the skip decision is all there is to coordinate"
            )
        return Settings(NoScaling(), **given)
    policy = _policy_of(fp16)
    if isinstance(policy, DynamicScale) and wanted in (None, DynamicScale.name):
        return Settings(replace(policy, **rule), **given)
    if isinstance(policy, StaticScale) and not rule and wanted in (None, policy.name):
        return Settings(policy, **given)
    start = {"init_scale": policy.init_scale} if wanted == StaticScale.name else {}
    return Settings(make_policy(wanted or DynamicScale.name, DynamicScale(**{**start, **rule})), **given)


def _policy_of(fp16: Mapping[str, Any]) -> Policy:
    values = {**_FP16_DEFAULTS, **{key: fp16[key] for key in _FP16_DEFAULTS if key in fp16}}
    static = values["loss_scale"]
    if not is_number(static) or not (static == 0 or MIN_SCALE <= static <= MAX_SCALE):
        raise ConfigError(f"fp16.loss_scale={static!r} is not allowed: 0 for a dynamic scale, or the scale itself")
    if static:
        return StaticScale(float(static))
    power, floor, window = values["initial_scale_power"], values["min_loss_scale"], values["loss_scale_window"]
    if not is_number(power) or not -126 <= power <= 126:
        raise ConfigError(f"fp16.initial_scale_power={power!r} is not allowed: it must be between -126 and 126")
    if not is_number(floor) or not 0 <= floor <= MAX_SCALE:
        raise ConfigError(f"fp16.min_loss_scale={floor!r} is not allowed: it must be between 0 and 2^126")
    if floor > 2.0**power:
        raise ConfigError(
            f"fp16.min_loss_scale={floor!r} is above the scale of the first step, 2^{power}; "
            "lower it or raise fp16.initial_scale_power"
        )
    refill = None
    if values["consecutive_hysteresis"] and values["hysteresis"] != 1:
        refill = REFILL_FOR_ANY_CLEAN_STEP
        _log.warning(
            "fp16.consecutive_hysteresis: the tolerance is refilled by %d clean steps in a row, where DeepSpeed asks "
            "for one: with one, a scale at which every other step overflows is never lowered. To choose another "
            "number, set hysteresis_refill",
            REFILL_FOR_ANY_CLEAN_STEP,
        )
    try:
        # DeepSpeed grows for the first time after window + 1 clean steps, and then after each window.
        return DynamicScale(
            init_scale=2.0**power,
            growth_interval=window,
            hysteresis=values["hysteresis"],
            min_scale=max(float(floor), MIN_SCALE),
            hysteresis_refill=refill,
            growth_delay=1,
        )
    except ConfigError as error:
        names = "growth_interval is fp16.loss_scale_window, min_scale is fp16.min_loss_scale"
        raise ConfigError(f"the fp16 block of the DeepSpeed config cannot be used: {error} ({names})") from None


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ConfigError(f"{where} has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")
