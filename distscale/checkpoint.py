"""The saved state of a scaler: plain numbers and strings, versioned, checked before anything is changed.

The first five keys are those of ``torch.amp.GradScaler``, which can load this state and whose state loads here.

It is equal on all ranks and says nothing of their number, so any number of ranks can load it. A scaler is a
``Stateful`` of ``torch.distributed.checkpoint``, by its ``state_dict`` and ``load_state_dict``: put it under a key at
the top of what is saved; further down torch pickles the object, and on loading leaves the one that it finds as it is::

    dcp.save({"scaler": scaler, "model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

The numbers are copies: training may go on while ``dcp.async_save`` writes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distscale.errors import ConfigError
from distscale.policy import MAX_COUNT, MAX_SCALE, DynamicScale, Policy, is_number

__all__ = ["TORCH_RULE_FIELDS", "VERSION", "SavedState", "decode", "encode"]

VERSION = 1
_MOST_STEPS = MAX_COUNT // 2  # leaves room to count on in int32
TORCH_RULE_FIELDS = ("growth_factor", "backoff_factor", "growth_interval")
_COUNTS = ("growth_interval", "hysteresis", "hysteresis_refill", "growth_delay")
_RULE_FIELDS = (*TORCH_RULE_FIELDS, "hysteresis", "min_scale", "max_scale", "hysteresis_refill", "growth_delay")
_TORCH_KEYS = ("scale", *TORCH_RULE_FIELDS, "_growth_tracker")


@dataclass(frozen=True)
class SavedState:
    """Everything that a restart must bring back."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int
    blocked_steps: int
    step: int


def encode(policy: Policy, state: SavedState) -> dict[str, Any]:
    """Returns the state dict. The rule travels with the state, as it does in torch."""
    rule = policy if isinstance(policy, DynamicScale) else DynamicScale()
    return {
        "scale": state.scale,
        **{key: getattr(rule, key) for key in _RULE_FIELDS},
        "_growth_tracker": state.growth_tracker,
        "hysteresis_tracker": state.hysteresis_tracker,
        "blocked_steps": state.blocked_steps,
        "step": state.step,
        "policy": policy.name,
        "version": VERSION,
    }


_KEYS = tuple(encode(DynamicScale(), SavedState(1.0, 0, 1, 0, 0)))


def decode(policy: Policy, saved: Mapping[str, Any]) -> tuple[Policy, SavedState]:
    """Reads a state dict of this library or of torch's GradScaler.

    Args:
        policy: of the scaler that loads; the saved rule replaces its own, with a warning where they differ.

    Returns:
        The policy and the state to go on with.

    Raises:
        ConfigError: if the dict is empty, foreign, incomplete, of a newer version or of another policy, or holds an
            impossible value or a key that is not a scaler's.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(f"this is not the state of a gradient scaler but a {type(saved).__name__}")
    if not saved:
        raise ConfigError("the saved scaler state is empty; it was probably saved from a scaler with enabled=False")
    version = saved.get("version", VERSION)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ConfigError(
            f"the saved scaler state has version {version!r}; this distscale reads versions up to {VERSION}. "
            "If a newer distscale saved it, load it with that one"
        )
    _check_keys(saved)
    kind = saved.get("policy", DynamicScale.name)
    if kind != policy.name:
        raise ConfigError(
            f"the saved scaler state is of policy {kind!r} and this scaler has policy {policy.name!r}; "
            f"build the scaler with policy={kind!r}, or do not load the state to start afresh"
        )
    scale = _number(saved, "scale")
    rule = {key: _rule_value(saved, key) for key in _RULE_FIELDS if key in saved} if kind == DynamicScale.name else {}
    changed = [
        f"{key} from {_shown(getattr(policy, key))} to {_shown(value)}"
        for key, value in rule.items()
        if getattr(policy, key) != value
    ]
    try:
        policy = replace(policy, init_scale=scale, **rule)  # type: ignore[type-var]
    except ConfigError as error:
        what = str(error).replace("init_scale=", "scale=")  # as the state calls it
        raise ConfigError(f"the saved scaler state cannot be used: {what}") from None
    hysteresis_tracker = _count(saved, "hysteresis_tracker", policy.hysteresis)
    if hysteresis_tracker > policy.hysteresis:
        raise ConfigError(
            f"the saved scaler state cannot be used: hysteresis_tracker={hysteresis_tracker} is above "
            f"hysteresis={policy.hysteresis}"
        )
    state = SavedState(
        scale=policy.init_scale,
        growth_tracker=_count(saved, "_growth_tracker"),
        hysteresis_tracker=hysteresis_tracker,
        blocked_steps=_count(saved, "blocked_steps", 0, most=_MOST_STEPS),
        step=_count(saved, "step", 0, most=_MOST_STEPS),
    )
    if changed:
        warnings.warn(f"the loaded scaler state changes {', '.join(changed)}", stacklevel=3)
    return policy, state


def _check_keys(saved: Mapping[str, Any]) -> None:
    """A key that is missing or misspelt must not come to mean a default."""
    missing = [key for key in _TORCH_KEYS if key not in saved]
    if missing:
        raise ConfigError(f"this is not the state of a gradient scaler: it has no {', '.join(map(repr, missing))}")
    if len(saved) == len(_TORCH_KEYS):
        return
    missing = [key for key in _KEYS if key not in saved]
    if missing:
        raise ConfigError(
            f"the saved scaler state has more than torch's keys, but lacks {', '.join(map(repr, missing))}: "
            "it is incomplete, or of another scaler"
        )
    unknown = [key for key in saved if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"the saved scaler state has keys that are not a scaler's: {', '.join(map(repr, unknown))}; "
            "take them out before loading"
        )


def _rule_value(saved: Mapping[str, Any], key: str) -> float | None:
    if saved[key] is None and key == "hysteresis_refill":
        return None
    return _count(saved, key) if key in _COUNTS else _number(saved, key)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _number(saved: Mapping[str, Any], key: str) -> float:
    value = saved[key]
    if not is_number(value) or not abs(value) <= MAX_SCALE:
        raise ConfigError(f"the saved scaler state cannot be used: {key} is {value!r}, not a number within 2^126")
    return float(value)


def _count(saved: Mapping[str, Any], key: str, default: int | None = None, most: int = MAX_COUNT) -> int:
    value = saved.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ConfigError(
            f"the saved scaler state cannot be used: {key} is {value!r}, not a whole number from 0 to {most}"
        )
    return value
