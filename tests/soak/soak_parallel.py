"""Layouts of model parallelism: tensors, experts and stages that are not on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from layout_models import Mlp, Stage, block, sequence_parallel, tensor_parallel
from soak_pieces import Layout, ScaleLoss, averaged, clip_by_torch, data, deferring, mesh_of, own_data
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

__all__ = [
    "expert_parallel",
    "idle_ranks",
    "local_experts",
    "pipeline",
    "sequence_and_tensor_parallel",
    "sharded_pipeline",
    "three_dimensional",
]


def sequence_and_tensor_parallel(seed: int, *, norms_first: bool) -> Layout:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = sequence_parallel(Mlp(seed), mesh)

    def backward(scale: ScaleLoss, seed: int) -> None:
        x = data(seed, mesh.get_local_rank("dp"), 2, 6, 8).chunk(2, dim=1)[mesh.get_local_rank("tp")]
        scale(model(x).square().mean()).backward()

    params = sorted(model.parameters(), key=lambda param: (param.dim() == 1) != norms_first)
    return Layout(params, backward, defer=deferring(model), clip=clip_by_torch(params), fsdp2=model)


class DenseAndExperts(nn.Module):
    def __init__(self, seed: int, expert: int) -> None:
        super().__init__()
        self.dense = block(seed)
        self.experts = block(seed + 1 + expert)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.dense(x))
        return y


def expert_parallel(seed: int, *, experts_first: bool) -> Layout:
    """A dense layer sharded over all ranks; two sets of experts, each sharded over two ranks."""
    mesh = mesh_of((2, 2), ("edp", "ep"))
    expert = mesh.get_local_rank("ep")
    model = DenseAndExperts(seed, expert)
    fully_shard(model.dense, mesh=mesh_of((4,), ("shard",)))
    fully_shard(model.experts, mesh=mesh["edp"])
    dense, experts = list(model.dense.parameters()), list(model.experts.parameters())
    first = len(experts) if experts_first else len(dense)
    return Layout(
        experts + dense if experts_first else dense + experts,
        own_data(model),
        lambda index: expert if (index < first) is experts_first else None,
        fsdp2=model,
    )


class Pipe:
    """A schedule with a loss function that is given anew for every pass."""

    def __init__(self, model: nn.Module, index: int, num_stages: int, group: Any) -> None:
        self._stage = PipelineStage(model, index, num_stages, torch.device("cpu"), group=group)
        self._index, self._num_stages = index, num_stages

    def backward(self, scale: ScaleLoss, seed: int) -> None:
        def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
            return scale((output - target).square().mean())

        runner = ScheduleGPipe(self._stage, n_microbatches=2, loss_fn=scaled_loss, scale_grads=False)
        x = data(seed, 0, 8, 8)
        if self._index == 0:
            runner.step(x)
        elif self._index == self._num_stages - 1:
            runner.step(target=x)
        else:
            runner.step()


def pipeline(seed: int) -> Layout:
    rank = dist.get_rank()
    model = Stage(seed + rank)
    params = list(model.parameters())
    return Layout(params, Pipe(model, rank, 4, None).backward, lambda index: rank, [3], missing=params)


def sharded_pipeline(seed: int) -> Layout:
    """Two stages, each sharded over two ranks."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    index = mesh.get_local_rank("pp")
    model = Stage(seed + index)
    fully_shard(model, mesh=mesh["dp"])
    pipe = Pipe(model, index, 2, mesh.get_group("pp"))
    return Layout(list(model.parameters()), pipe.backward, lambda place: index, [2, 3], fsdp2=model)


def three_dimensional(seed: int) -> Layout:
    """On eight ranks, two stages, each under FSDP2 and tensor parallel on a 2x2 mesh."""
    mesh = mesh_of((2, 2, 2), ("pp", "dp", "tp"))
    index = mesh.get_local_rank("pp")
    model = Stage(seed + index)
    tensor_parallel(model, mesh, "layers.")
    pipe = Pipe(model, index, 2, mesh.get_group("pp"))
    return Layout(list(model.parameters()), pipe.backward, lambda place: index, range(4, 8), fsdp2=model)


def local_experts(seed: int) -> Layout:
    """Plain tensors: a dense layer on all ranks, and on each of them an expert of its own."""
    rank = dist.get_rank()
    model = DenseAndExperts(seed, rank)
    dense, experts = list(model.dense.parameters()), list(model.experts.parameters())
    return Layout(
        dense + experts,
        averaged(own_data(model), dense),
        lambda index: None if index < len(dense) else rank,
        idle=experts,
    )


def idle_ranks(seed: int) -> Layout:
    """An expert of its own on each rank and nothing else, so that an idle rank has no gradients at all."""
    rank = dist.get_rank()
    model = block(seed + rank)
    params = list(model.parameters())
    return Layout(params, own_data(model), lambda index: rank, idle=params)
