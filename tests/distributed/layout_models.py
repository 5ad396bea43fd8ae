"""Models that the tests of several files lay out, and the layouts of those that more than one of them builds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = [
    "Attention",
    "Mlp",
    "Stage",
    "block",
    "context_parallel_backward",
    "let_fsdp1_offload",
    "sequence_parallel",
    "tensor_parallel",
]


def block(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width))


class Stage(nn.Module):
    """A stage of a pipeline; all stages call their tensors alike."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layers = block(index)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


class Mlp(nn.Module):
    """Of a transformer, with its norm: what tensor and sequence parallelism are made for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Attention(nn.Module):
    """Of a transformer, with its norm: what context parallelism is made for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # shape (batch, heads, sequence, width)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return y


def context_parallel_backward(model: nn.Module, scale: Callable[[Tensor], Tensor], x: Tensor, mesh: DeviceMesh) -> None:
    """Torch's own context parallelism: each rank of ``mesh`` has its part of every sequence, and attends to all of it.

    Ring attention is for GPUs alone. The other attention that torch 2.13 gathers keys and values for is this one.

    Args:
        x: shape (batch, sequence, 8); whole, and the same on the ranks of ``mesh``.
    """
    part = x.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.MATH):
        scale(model(part).square().mean()).backward()


def let_fsdp1_offload() -> None:
    """Lets FSDP1 offload to the CPU without an accelerator, for the rest of this process.

    All that it wants one for is to pin memory, and to wait for the copies from the device. The rest is its own code.
    """
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, misc]
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]


def sequence_parallel(model: Mlp, mesh: DeviceMesh, *, with_fsdp2: bool = True) -> Mlp:
    """TP on axis "tp", with its part of each sequence a rank and replicated norms; if wanted, FSDP2 on axis "dp"."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"]) if with_fsdp2 else model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, prefix: str = "") -> nn.Module:
    """FSDP2 on axis "dp", TP on axis "tp"; the norm is no DTensor of TP, but held whole by its ranks.

    Args:
        prefix: of the names of a :func:`block` in ``model``.
    """
    plan = {
        f"{prefix}0": ColwiseParallel(output_layouts=Replicate()),
        f"{prefix}2": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])
