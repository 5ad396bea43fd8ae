"""FSDP2: sweeping the gradients of each unit while the backward pass of the next one runs."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distscale.errors import ConfigError
from distscale.scaler import DistributedGradScaler
from distscale.sweep.early import EarlySweeps

__all__ = ["overlap"]


def overlap(scaler: DistributedGradScaler, model: nn.Module) -> int:
    """Moves the sweep of FSDP2's gradients into the backward pass, right behind each unit's reduction.

    Call it once, after ``fully_shard``. A gradient that is accumulated, cast to another dtype, divided or moved to the
    CPU after its reduction is swept at ``step`` as always, and so are those of an optimizer after ``unscale_``. Do not
    change gradients in other ways between ``backward`` and ``step``: clip with the scaler's ``max_norm``. Most changes
    are noticed, by ``grad._version``; but torch does not count those by ``_foreach`` operators on DTensors, as in
    ``clip_grad_norm_``, or through ``grad.data``.

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
        for group in _groups(unit):
            if len(_groups(unit)) == 1 and group._all_reduce_hook is None:
                unit.set_all_reduce_hook(partial(_sweep_unit, early, group))
                num_early += 1
    return num_early


def _groups(unit: FSDPModule) -> list[Any]:
    """The unit's parameter groups; one, unless its parameters lie on several meshes; none if it has no parameters."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 has one
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _sweep_unit(early: EarlySweeps, group: Any, reduced: Tensor) -> None:
    """The hook: ``reduced`` is flat, this rank's padded piece of every gradient of the unit, one after the other."""
    params = group.fsdp_params
    padded = [param.padded_sharded_param_size.numel() for param in params]
    if sum(padded) != reduced.numel():
        return  # some had no gradient in this pass, and we are not told which
    starts = accumulate(padded, initial=0)
    pieces = [reduced[start : start + param.sharded_size.numel()] for start, param in zip(starts, params, strict=False)]
    early.sweep(group, pieces)
