"""The saved state of FP8 scales: the recipe, and each tensor's history by name.

It is JSON in one string, whatever is in it. So ``torch.distributed.checkpoint``, which brings back what the state to be
loaded into has already, brings back the histories of a scaler that has none yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distscale.errors import ConfigError
from distscale.fp8.recipe import DelayedScaling, Recipe
from distscale.policy import is_number

__all__ = ["decode", "encode", "split"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MAY_DIFFER = "amax_history_len"
"""Of a longer or shorter history the newest entries say the same. By all else in a recipe the scales would jump."""


def encode(recipe: Recipe, histories: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Zeros, which say that nothing is remembered, are left out, and so are tensors of which nothing is."""
    known = {name: [amax for amax in history if amax > 0] for name, history in histories.items()}
    known = {name: history for name, history in known.items() if history}
    return {"recipe": json.dumps(recipe.as_dict()), "amax_history": json.dumps(known)}


def decode(recipe: Recipe, state: Mapping[str, str], reset: bool) -> dict[str, list[float]]:
    """Reads what :func:`encode` wrote: histories by name, newest first.

    Raises:
        ConfigError: see :meth:`Fp8Scales.load_state_dict`.
    """
    if not isinstance(state, Mapping) or set(state) != {"recipe", "amax_history"}:
        raise ConfigError("this is not the state of FP8 scales: it must have 'recipe' and 'amax_history', and no more")
    theirs = _read(state, "recipe")
    differing = _differences(theirs, recipe.as_dict())
    if differing and reset:
        return {}
    if differing:
        raise ConfigError(
            f"the saved FP8 scales are of another recipe: {'; '.join(differing)}. Use that recipe; or begin without "
            "histories: load the scaler's state without its 'fp8' (or scales that were saved alone with reset=True)"
        )
    if isinstance(recipe, DelayedScaling):
        try:
            DelayedScaling(amax_history_len=theirs[_MAY_DIFFER])
        except ConfigError as error:
            raise ConfigError(f"the saved FP8 scales cannot be used: {error}") from None
    histories = _read(state, "amax_history")
    for name, history in histories.items():
        if not isinstance(history, list) or not all(is_number(amax) and _is_amax(amax) for amax in history):
            raise ConfigError(f"the saved FP8 scales cannot be used: the history of {name} holds impossible values")
    # JSON may have written whole numbers, of any size.
    return {name: [float(amax) for amax in history] for name, history in histories.items()}


def split(state: Mapping[str, Any], recipe: Recipe | None) -> tuple[Mapping[str, Any], Mapping[str, str] | None]:
    """Takes the FP8 histories out of a scaler's state, if there are any.

    Args:
        recipe: of the scaler's FP8 scales; None if it has none.

    Returns:
        The rest, and what :meth:`Fp8Scales.load_state_dict` takes, which is checked.

    Raises:
        ConfigError: if they cannot be used.
    """
    histories = state.get("fp8") if isinstance(state, Mapping) else None
    if histories is None:
        return state, None
    if recipe is None:
        raise ConfigError(
            "the saved scaler state has FP8 histories, and this scaler was made without fp8=; give it, or take 'fp8' "
            "out of the state to go on without FP8"
        )
    decode(recipe, histories, reset=False)
    return {key: value for key, value in state.items() if key != "fp8"}, histories


def _differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """In what the recipes differ. A field that one of them lacks must not come to mean a default."""
    is_same_kind = saved.get("recipe") == mine["recipe"]
    keys = {*saved, *mine} if is_same_kind else {"recipe", *(saved.keys() & mine.keys())}
    return [
        f"{_said(saved, key)} in the state, {_said(mine, key)} here"
        for key in sorted(keys)
        if _said(saved, key) != _said(mine, key) and not (key == _MAY_DIFFER and key in saved)
    ]


def _said(recipe: Mapping[str, Any], key: str) -> str:
    return f"{key}={recipe[key]!r}" if key in recipe else f"no {key}"


def _read(state: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        value = json.loads(state[key])
    except (TypeError, ValueError, RecursionError):  # not JSON, too many digits, nested too deeply
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"the saved FP8 scales cannot be used: {key} is not the JSON of an object")
    return value


def _is_amax(value: float) -> bool:
    return 0 < value <= _FLOAT32_MAX  # a whole number may be too large for a float
