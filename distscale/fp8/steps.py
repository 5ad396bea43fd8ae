"""The end of a step, for FP8: what was decided, over all ranks, becomes the scales of the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distscale.decision import Decision
from distscale.fp8.keeper import Fp8Scales

__all__ = ["end_step"]


def end_step(fp8: Fp8Scales, decisions: Sequence[Decision], next_loss_scale: Tensor) -> None:
    """Lets what the ranks have seen enter the histories, once, and hands out new scales. Syncs host: no.

    Args:
        decisions: since the last update, on one loss scale. If one of them was to skip, none counts for gradients.
        next_loss_scale: fp32, shape ().
    """
    # Tensors may have come in between; what was seen before that is of a shorter table.
    decisions = [decision for decision in decisions if decision.table is decisions[-1].table]
    if not decisions:
        fp8.hand_out(next_loss_scale)
        return
    bits = torch.stack([decision.fp8_bits for decision in decisions]).amax(dim=0)
    found_inf = torch.stack([decision.verdict.found_inf for decision in decisions]).amax()
    fp8.finish_step(bits, found_inf, decisions[-1].loss_scale, next_loss_scale)
