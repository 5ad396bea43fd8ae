"""FSDP2: sweeping the gradients of each unit while the backward pass of the next one runs."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distscale.errors import ConfigError
from distscale.fsdp_units import param_groups
from distscale.scaler import DistributedGradScaler
from distscale.sweep.early import EarlySweeps

__all__ = ["overlap"]


def overlap(scaler: DistributedGradScaler, model: nn.Module) -> int:
    """Moves the sweep of FSDP2's gradients into the backward pass, right behind each unit's reduction.

    Call it once, after ``fully_shard``. It is a promise that nothing writes to these gradients between their reduction
    and ``step``: what is written then may be stepped unseen. So clip with the scaler's ``max_norm``, and reduce over
    further ranks before FSDP2 does, or not at all. After ``unscale_``, ``step`` sweeps again, so that clipping by hand
    works too. A gradient that FSDP2 itself accumulates, casts, divides or moves to the CPU is swept as always.

    ``grad._version`` tells of most writes, and such gradients are swept again; but torch counts neither collectives,
    nor ``_foreach`` operators on DTensors, nor what goes through ``grad.data``.

    It takes the all-reduce hook of every unit (``FSDPModule.set_all_reduce_hook``); units that have one already, or
    parameters on several meshes, are left alone.

    Returns:
        The number of units whose gradients are swept early.

    Collective: no.

    Raises:
        ConfigError: if ``model`` has no FSDP2 unit.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ConfigError(f"{type(model).__name__} has no FSDP2 unit; call fully_shard() on it before overlap()")
    early = scaler.early_sweeps
    num_early = 0
    for unit in units:
        for group in param_groups(unit):
            if len(param_groups(unit)) == 1 and group._all_reduce_hook is None:
                unit.set_all_reduce_hook(partial(_sweep_unit, early, group))
                num_early += 1
    return num_early


def _sweep_unit(early: EarlySweeps, group: Any, reduced: Tensor) -> None:
    """The hook: ``reduced`` is flat, this rank's padded piece of every gradient of the unit, one after the other."""
    params = group.fsdp_params
    padded = [param.padded_sharded_param_size.numel() for param in params]
    if sum(padded) != reduced.numel():
        return  # some had no gradient in this pass, and we are not told which
    starts = accumulate(padded, initial=0)
    pieces = [reduced[start : start + param.sharded_size.numel()] for start, param in zip(starts, params, strict=False)]
    early.sweep(group, pieces)
