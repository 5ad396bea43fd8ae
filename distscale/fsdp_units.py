"""The parameter groups of FSDP2, which torch keeps to itself."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

__all__ = ["param_groups"]


def param_groups(unit: FSDPModule) -> list[Any]:
    """The unit's parameter groups; one, unless its parameters lie on several meshes; none if it has no parameters."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 has one
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
