"""From amax to scale, and from one step's amax to the next history: pure functions over all slots at once.

A scale multiplies on quantizing: ``fp8 = cast(value * scale)``. A scale of 0 says that there is none yet. Nothing here
talks to other ranks or syncs the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distscale.fp8.recipe import DelayedScaling, Recipe
from distscale.sweep import INF_BITS

__all__ = ["advance", "bits_of_amax", "history_amax", "scale_of_amax", "scaled", "unscaled"]

_EXPONENT_OF_FLOAT64 = 0x7FF0000000000000
_FLOAT32_MAX = torch.finfo(torch.float32).max


def scale_of_amax(amax: Tensor, largest: float | Tensor, recipe: Recipe, otherwise: float | Tensor = 0.0) -> Tensor:
    """The scale that brings ``amax`` to the largest number of an FP8 format: ``largest / 2**margin / amax``.

    The division is done in float64, and the result kept within 2^-126 and 2^126: so neither the scale nor its
    reciprocal is ever 0 or infinite, and no value is too small to be scaled. Source: arXiv 2209.05433, section 3.

    Args:
        amax: fp32, any shape.
        largest: of the format: 448 for E4M3, 57344 for E5M2; or one for each amax.
        otherwise: the scale where amax is 0, infinite or NaN.

    Returns:
        fp32, shape of ``amax``.
    """
    scale = (largest * 2.0**-recipe.margin) / amax.double()
    if recipe.power_of_two:
        scale = (scale.view(torch.int64) & _EXPONENT_OF_FLOAT64).view(torch.float64)
    # Written out: torch.compile with dynamic=True takes global floats for variables, and fails by it.
    scale = scale.clamp(2.0**-126, 2.0**126).float()
    return torch.where((amax > 0) & (amax <= torch.finfo(torch.float32).max), scale, otherwise)


def bits_of_amax(values: Tensor) -> Tensor:
    """Amax of ``values`` as bits of fp32: int32, shape (); 0 of none, at least ``INF_BITS`` for inf and NaN.

    In operators that ``torch.compile`` fuses with the cast.
    """
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.int32, device=values.device)
    return values.detach().abs().amax().float().view(torch.int32) & 0x7FFFFFFF


def unscaled(bits: Tensor, loss_scale: Tensor) -> Tensor:
    """Amax bits of gradients that carry ``loss_scale``, without it: int32 bits, at most those of the largest fp32."""
    amax = (bits.view(torch.float32).double() / loss_scale.double()).clamp(max=_FLOAT32_MAX).float()
    return torch.where(bits >= INF_BITS, bits, amax.view(torch.int32))


def scaled(amax: Tensor, loss_scale: Tensor) -> Tensor:
    """Of gradients that will carry ``loss_scale``: fp32, at most the largest fp32."""
    return (amax.double() * loss_scale.double()).clamp(max=_FLOAT32_MAX).float()


def advance(history: Tensor, bits: Tensor, commits: Tensor) -> Tensor:
    """Takes one step's amax values into the history, where there is something to take.

    Args:
        history: fp32, shape (amax_history_len, num_slots), newest first; 0 where nothing is remembered.
        bits: int32, shape (num_slots,): of this step, over all micro-batches and ranks.
        commits: bool, shape (num_slots,) or (): where they may enter.

    Returns:
        The new history. It stays as it is where ``bits`` is 0, for a tensor that was not used, or not finite.
    """
    takes = commits & (bits > 0) & (bits < INF_BITS)
    return torch.where(takes, torch.cat([bits.view(torch.float32)[None], history[:-1]]), history)


def history_amax(history: Tensor, recipe: DelayedScaling) -> Tensor:
    """What of the history counts: fp32, shape (num_slots,); 0 without a history."""
    return history[0] if recipe.amax_compute_algo == "most_recent" else history.amax(dim=0)
