"""The saved state of FP8 scales: the recipe, and each tensor's history by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distscale.errors import ConfigError
from distscale.fp8.recipe import Recipe
from distscale.policy import is_number

__all__ = ["decode", "encode"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MAY_DIFFER = ("amax_history_len", "amax_compute_algo", "margin", "power_of_two")
"""A history is as true under another rule for reading it."""


def encode(recipe: Recipe, histories: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Plain numbers and strings. Trailing zeros, which say that nothing is remembered, are left out."""
    return {
        "recipe": recipe.as_dict(),
        "amax_history": {name: _without_zeros(history) for name, history in histories.items()},
    }


def decode(recipe: Recipe, state: Mapping[str, Any], reset: bool) -> dict[str, list[float]]:
    """Reads what :func:`encode` wrote: histories by name, newest first.

    Raises:
        ConfigError: see :meth:`Fp8Scales.load_state_dict`.
    """
    if not isinstance(state, Mapping) or set(state) != {"recipe", "amax_history"}:
        raise ConfigError("this is not the state of FP8 scales: it must have 'recipe' and 'amax_history', and no more")
    mine, saved = recipe.as_dict(), state["recipe"]
    differing = [key for key in sorted({*mine, *saved} - {*_MAY_DIFFER}) if mine.get(key) != saved.get(key)]
    if differing:
        if reset:
            return {}
        found = ", ".join(f"{key}={saved.get(key)!r} and not {mine.get(key)!r}" for key in differing)
        raise ConfigError(
            f"the saved FP8 scales are of another recipe: {found}; use that recipe, or load with reset=True to begin "
            "without a history"
        )
    histories: dict[str, list[float]] = {}
    for name, history in state["amax_history"].items():
        if not all(is_number(amax) and math.isfinite(amax) and 0 < amax <= _FLOAT32_MAX for amax in history):
            raise ConfigError(f"the saved FP8 scales cannot be used: the history of {name} holds impossible values")
        histories[str(name)] = list(map(float, history))
    return histories


def _without_zeros(history: Sequence[float]) -> list[float]:
    return [amax for amax in history if amax > 0]
