"""Models that the tests of several files lay out, and the layouts of those that more than one of them builds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

__all__ = ["Mlp", "Stage", "block", "sequence_parallel", "tensor_parallel"]


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
