"""How FP8 scales are made: recipes, as plain values that all ranks must share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch

from distscale.errors import ConfigError
from distscale.fp8.meter import Metered

__all__ = ["CurrentScaling", "DelayedScaling", "Recipe"]

_FORMATS = {
    "E4M3": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "E5M2": (torch.float8_e5m2, torch.float8_e5m2),
    "HYBRID": (torch.float8_e4m3fn, torch.float8_e5m2),
}
"""The first is the dtype of most tensors."""
_LONGEST_HISTORY = 65536


@dataclass(frozen=True)
class Recipe:
    """What both kinds of recipe have.

    Args:
        fp8_format: "E4M3", "E5M2", or "HYBRID": E5M2 for the gradients of the outputs of linears, whose values reach
            over many powers of two (arXiv 2209.05433), E4M3 for all else, also for gradients that are sent.
        margin: powers of two that are left free above the largest value, for the next steps to grow into.
        power_of_two: round the scale down to a power of two, so that multiplying with it rounds nothing.
    """

    fp8_format: Literal["E4M3", "E5M2", "HYBRID"] = "HYBRID"
    margin: int = 0
    power_of_two: bool = True

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if self.fp8_format not in _FORMATS:
            raise ConfigError(f"fp8_format={self.fp8_format!r} is not allowed: {', '.join(_FORMATS)}")
        if type(self.margin) is not int or not 0 <= self.margin <= 16:
            raise ConfigError(f"margin={self.margin!r} is not allowed: a whole number of powers of two, 0 to 16")
        if type(self.power_of_two) is not bool:
            raise ConfigError(f"power_of_two={self.power_of_two!r} is not allowed: True or False")

    def dtype_of(self, tensor: Metered) -> torch.dtype:
        """The FP8 dtype of ``tensor``."""
        for_most, for_output_gradients = _FORMATS[self.fp8_format]
        return for_output_gradients if tensor.is_gradient and not tensor.is_sent else for_most

    def as_dict(self) -> dict[str, str | int | bool]:
        """Plain values, for a saved state and for messages."""
        return {"recipe": self.name, **{field.name: getattr(self, field.name) for field in fields(self)}}


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """The scale of a step comes from the amax values of the steps before it, on which all ranks have agreed.

    A tensor is read once: cast with a scale that is known, while its amax is found for later steps. A tensor without a
    history is scaled by its own amax.

    Args:
        amax_history_len: steps that are remembered.
        amax_compute_algo: what of them counts: "max", or "most_recent".
    """

    amax_history_len: int = 16
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.amax_history_len) is not int or not 1 <= self.amax_history_len <= _LONGEST_HISTORY:
            raise ConfigError(
                f"amax_history_len={self.amax_history_len!r} is not allowed: a number of steps, 1 to {_LONGEST_HISTORY}"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigError(f"amax_compute_algo={self.amax_compute_algo!r} is not allowed: max, most_recent")


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """The scale of a tensor comes from its own amax, on each rank and at each use: two reads, and no history."""

    name: ClassVar[str] = "current"
