"""From parameters to the local, dense, real tensors that hold this rank's part of the gradients."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from distscale.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Fp8Shard", "Shard", "drop_fp8", "is_dtensor", "is_here", "is_partial", "restore_fp8", "shard_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one gradient."""

    values: Tensor
    """Dense, real, local; shares memory with the gradient. Any floating dtype, any shape, possibly empty."""
    num_shards: int
    """Into how many pieces the gradient is cut over its mesh; 1 for a plain tensor."""
    scale_inv: Tensor | None = None
    """fp32, one element: what ``values`` are to be multiplied with, if they are FP8."""

    @property
    def to_rescale(self) -> Tensor:
        """What to multiply in place so that the gradient is multiplied."""
        return self.values if self.scale_inv is None else self.scale_inv


class Fp8Shard:
    """This rank's part of a gradient that is kept in FP8, as ``param.fp8_grad``; see :mod:`distscale.fp8.shards`.

    Args:
        values: FP8, this rank's part.
        scale_inv: fp32, shape ().
        like: the gradient, whose dtype and place on a mesh are noted; its values are not.
    """

    def __init__(self, values: Tensor, scale_inv: Tensor, like: Tensor) -> None:
        self.values, self.scale_inv = values, scale_inv
        self._dtype = like.dtype
        self._spec = (like.device_mesh, like.placements, like.shape, like.stride()) if is_dtensor(like) else None

    @property
    def num_shards(self) -> int:
        """Into how many pieces the gradient is cut over its mesh."""
        return 1 if self._spec is None else _num_shards(*self._spec[:2])

    def dequantized(self) -> Tensor:
        """fp32, this rank's part."""
        return self.values.float() * self.scale_inv

    def gradient(self) -> Tensor:
        """As it was, but for what FP8 has lost."""
        local = self.dequantized().to(self._dtype)
        if self._spec is None:
            return local
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._spec
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def shard_of(param: Tensor) -> Shard | None:
    """This rank's part of ``param.grad``, or of ``param.fp8_grad``; None if there is no gradient.

    A sparse gradient is coalesced in place first, so that duplicate indices are summed before they are checked. A
    DTensor gradient with a pending reduction (``Partial``) is reduced first.

    Collective: only for a ``Partial`` gradient, over its own mesh. Syncs host: only for a sparse gradient.

    Raises:
        ConfigError: if there is a gradient beside the one in FP8.
    """
    grad = param.grad
    kept: Fp8Shard | None = getattr(param, "fp8_grad", None)
    if kept is not None:
        if grad is not None:
            # DDP writes what it has reduced, without this rank's part, which had been taken from it.
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} got a gradient after its own was moved into FP8, as DDP "
                "does, so that ranks would step apart: leave keep_gradients_in_fp8 out, or use FSDP2"
            )
        return Shard(kept.values, kept.num_shards, kept.scale_inv)
    if grad is None:
        return None
    num_shards = 1
    if is_dtensor(grad):
        if is_partial(grad):
            from torch.distributed.tensor import Replicate

            grad = grad.redistribute(
                placements=[Replicate() if placement.is_partial() else placement for placement in grad.placements]
            )
            param.grad = grad
        num_shards = _num_shards(grad.device_mesh, grad.placements)
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


def restore_fp8(params: Iterable[Tensor]) -> None:
    """Takes gradients that are kept in FP8 back into ``grad``. Collective: no. Syncs host: no."""
    for param in params:
        kept: Fp8Shard | None = getattr(param, "fp8_grad", None)
        if kept is not None:
            param.grad = kept.gradient()
            del param.fp8_grad  # type: ignore[attr-defined]


def drop_fp8(params: Iterable[Tensor]) -> None:
    """Forgets gradients that are kept in FP8."""
    for param in params:
        if hasattr(param, "fp8_grad"):
            del param.fp8_grad


def _num_shards(mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    return math.prod(mesh.size(axis) for axis, placement in enumerate(placements) if not placement.is_replicate())


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is a DTensor.

    DTensor is not imported for it, which takes 0.4 s and only a program with an optimizer needs: where nobody has
    imported it, there are none.
    """
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_partial(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor that is still to be summed over ranks."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def is_here(param: Tensor) -> bool:
    """Whether this rank is part of the mesh that ``param`` lives on; true for a plain tensor."""
    return not is_dtensor(param) or param.device_mesh.get_coordinate() is not None
