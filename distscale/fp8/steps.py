"""The end of a step, for FP8: what was decided, over all ranks, becomes the scales of the next step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distscale.decision import Decision
from distscale.fp8.keeper import Fp8Scales

__all__ = ["end_step", "warn_if_forgotten"]


def warn_if_forgotten(model: object) -> None:
    """Warns of a model with FP8 linears whose scaler is not to know of it."""
    linear = sys.modules.get("distscale.fp8.linear")  # where nobody has imported it, there are none
    if linear is None or not isinstance(model, nn.Module):
        return
    if any(isinstance(module, linear.Fp8Linear) for module in model.modules()):
        warnings.warn(
            "the model has FP8 linears, and the scaler was made without fp8=: they will scale by their own amax "
            "for ever, on each rank by itself. Give the scaler what convert_to_fp8() returned",
            stacklevel=4,
        )


def end_step(fp8: Fp8Scales, decisions: Sequence[Decision], loss_scale: Tensor, next_loss_scale: Tensor) -> None:
    """Lets what the ranks have seen enter the histories, once, and hands out new scales. Syncs host: no.

    Args:
        decisions: since the last update. The last one has all that was seen since then. If one of them was to skip,
            nothing counts for gradients. None at all: the step was given up, and nothing counts.
        loss_scale: fp32, shape (): up to now.
        next_loss_scale: fp32, shape ().
    """
    if decisions:
        last = decisions[-1]
        found_inf = torch.stack([decision.verdict.found_inf for decision in decisions]).amax()
        fp8.finish_step(last.fp8_bits, found_inf, last.loss_scale, next_loss_scale)
    else:
        fp8.finish_step(None, torch.ones_like(loss_scale), loss_scale, next_loss_scale)
    fp8.clear()
