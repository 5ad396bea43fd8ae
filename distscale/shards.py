"""From parameters to the local, dense, real tensors that hold this rank's part of the gradients."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Shard", "is_dtensor", "is_here", "shard_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one gradient."""

    values: Tensor
    """Dense, real, local; shares memory with the gradient. Any floating dtype, any shape, possibly empty."""
    num_shards: int
    """Into how many pieces the gradient is cut over its mesh; 1 for a plain tensor."""


def shard_of(param: Tensor) -> Shard | None:
    """This rank's part of ``param.grad``, or None if there is no gradient.

    A sparse gradient is coalesced in place first, so that duplicate indices are summed before they are checked. A
    DTensor gradient with a pending reduction (``Partial``) is reduced first.

    Collective: only for a ``Partial`` gradient, over its own mesh. Syncs host: only for a sparse gradient.
    """
    grad = param.grad
    if grad is None:
        return None
    num_shards = 1
    if is_dtensor(grad):
        if any(placement.is_partial() for placement in grad.placements):
            from torch.distributed.tensor import Replicate

            grad = grad.redistribute(
                placements=[Replicate() if placement.is_partial() else placement for placement in grad.placements]
            )
            param.grad = grad
        mesh, placements = grad.device_mesh, grad.placements
        num_shards = math.prod(
            mesh.size(axis) for axis, placement in enumerate(placements) if not placement.is_replicate()
        )
        num_changes = grad._version
        grad = grad.to_local()
        if num_changes:
            # Operators on a DTensor are counted there alone; see distscale.sweep.early.
            torch.autograd.graph.increment_version(grad)
    elif not grad.is_sparse and any(step == 0 < size - 1 for step, size in zip(grad.stride(), grad.shape, strict=True)):
        # An expanded gradient: what is read once could not be written once.
        grad = grad.clone(memory_format=torch.contiguous_format)
        param.grad = grad
    elif grad.is_neg() or grad._is_zerotensor():
        # Views of another sign, and zeros without memory: their values are not in memory as they are.
        grad = param.grad = grad.resolve_neg().clone()
    if grad.is_sparse:
        if not grad.is_coalesced():
            grad = grad.coalesce()
            param.grad = grad
        grad = grad._values()
    if grad.is_complex():
        if grad.is_conj():
            grad = param.grad = grad.resolve_conj()
        grad = torch.view_as_real(grad)
    return Shard(grad.detach(), num_shards)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is a DTensor.

    DTensor is not imported for it, which takes 0.4 s and only a program with an optimizer needs: where nobody has
    imported it, there are none.
    """
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_here(param: Tensor) -> bool:
    """Whether this rank is part of the mesh that ``param`` lives on; true for a plain tensor."""
    return not is_dtensor(param) or param.device_mesh.get_coordinate() is not None
