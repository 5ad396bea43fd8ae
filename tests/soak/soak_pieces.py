"""What a layout is, a model on this rank and how its gradients come about, and what the layouts are built of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

__all__ = ["Layout", "ScaleLoss", "averaged", "clip_by_torch", "data", "deferring", "mesh_of", "own_data"]

ScaleLoss = Callable[[Tensor], Tensor]


@dataclass
class Layout:
    params: list[nn.Parameter]
    """In the order of the optimizer."""
    backward: Callable[[ScaleLoss, int], None]
    """Given what scales the loss, and a seed for the data."""
    owner: Callable[[int], Hashable] = lambda index: None
    """Plain parameters (by place in ``params``) and shards are replicas of those of their place on other ranks if this
    is equal there."""
    loss_ranks: Sequence[int] = range(4)
    defer: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Gradients are not reduced in it."""
    idle: Sequence[nn.Parameter] = ()
    """These may have no gradients on a rank."""
    missing: Sequence[nn.Parameter] = ()
    """These have on every rank, but no other rank would notice if they had not."""
    clip: Callable[[float], object] | None = None
    """Torch's way to clip, if it has one that works."""
    is_fsdp1: bool = False
    fsdp2: nn.Module | None = None
    """Has the units whose gradients can be swept in the backward pass."""

    def key(self, index: int) -> Hashable:
        """Equal on the ranks that hold the same piece of this parameter."""
        param = self.params[index]
        place: Hashable = None
        if isinstance(param, DTensor):
            coordinate = param.device_mesh.get_coordinate()
            assert coordinate is not None
            place = tuple(
                at for at, placement in zip(coordinate, param.placements, strict=True) if not placement.is_replicate()
            )
        return index, self.owner(index), place


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One for all episodes: its process groups keep threads and sockets."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def data(seed: int, of: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(8 * seed + of))


def clip_by_torch(params: Iterable[Tensor]) -> Callable[[float], object]:
    held = list(params)
    return lambda max_norm: torch.nn.utils.clip_grad_norm_(held, max_norm)


def own_data(model: nn.Module, width: int = 8) -> Callable[[ScaleLoss, int], None]:
    """Each rank has data of its own."""

    def backward(scale: ScaleLoss, seed: int) -> None:
        scale(model(data(seed, dist.get_rank(), 6, width)).pow(2).mean()).backward()

    return backward


def averaged(backward: Callable[[ScaleLoss, int], None], params: Sequence[nn.Parameter]) -> Any:
    """``backward``, and then the gradients of ``params`` averaged over all ranks by hand."""

    def backward_and_average(scale: ScaleLoss, seed: int) -> None:
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        backward(scale, seed)
        for param, sum_before in zip(params, before, strict=True):
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
            if sum_before is not None:
                param.grad += sum_before

    return backward_and_average


def deferring(model: Any) -> Callable[[], AbstractContextManager[None]]:
    """FSDP2's ``no_sync``."""

    @contextmanager
    def defer() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return defer
