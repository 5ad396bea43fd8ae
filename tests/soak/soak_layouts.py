"""The layouts on four ranks: a model on this rank, and how its gradients come about."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from test_every_layout import Stage, block
from test_layouts import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
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
    loss_ranks: Sequence[int] = (0, 1, 2, 3)
    defer: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Gradients are not reduced in it."""
    idle: Sequence[nn.Parameter] = ()
    """These may have no gradients on a rank."""
    missing: Sequence[nn.Parameter] = ()
    """These have on every rank, but no other rank would notice if they had not."""
    clip: Callable[[float], object] | None = None
    """Torch's way to clip, if it has one that works."""
    is_fsdp1: bool = False
    overflows_by_itself: bool = False

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


def ddp(seed: int) -> Layout:
    model = DistributedDataParallel(block(seed))
    params = list(model.parameters())
    return Layout(params, own_data(model), defer=model.no_sync, clip=clip_by_torch(params))


def fsdp1(seed: int, *, use_orig_params: bool = True, hybrid: bool = False) -> Layout:
    model = FullyShardedDataParallel(
        block(seed),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        use_orig_params=use_orig_params,
        device_id=CPU,
        device_mesh=mesh_of((2, 2), ("replicate", "shard")) if hybrid else None,
    )
    shard = dist.get_rank() % 2 if hybrid else dist.get_rank()
    return Layout(
        list(model.parameters()),
        own_data(model),
        lambda index: shard,
        defer=model.no_sync,
        clip=model.clip_grad_norm_,
        is_fsdp1=True,
    )


def deferring(model: Any) -> Callable[[], AbstractContextManager[None]]:
    """FSDP2's ``no_sync``."""

    @contextmanager
    def defer() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return defer


def fsdp2(seed: int, *, width: int = 8, hybrid: bool = False, fp16: bool = False, **policies: Any) -> Layout:
    """With a width of 3, the second and third rank have one row, and the last has none."""
    torch.manual_seed(seed)
    model: Any = block(seed, width)
    mesh = mesh_of((2, 2), ("replicate", "shard")) if hybrid else mesh_of((4,), ("shard",))
    if fp16:
        policies["mp_policy"] = MixedPrecisionPolicy(torch.float16, torch.float16, torch.float32)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, **policies)
    params = list(model.parameters())
    return Layout(
        params,
        own_data(model, width),
        defer=deferring(model),
        missing=[] if hybrid else params,
        clip=clip_by_torch(params),
        overflows_by_itself=fp16,
    )


def tensor_parallel(seed: int, *, norms_first: bool) -> Layout:
    """FSDP2 x TP, sequence parallel, the norms replicated over TP."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    torch.manual_seed(seed)
    model = Block()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])

    def backward(scale: ScaleLoss, seed: int) -> None:
        x = data(seed, mesh.get_local_rank("dp"), 2, 6, 8).chunk(2, dim=1)[mesh.get_local_rank("tp")]
        scale(model(x).square().mean()).backward()

    params = sorted(model.parameters(), key=lambda param: (param.dim() == 1) != norms_first)
    return Layout(params, backward, defer=deferring(model), clip=clip_by_torch(params))


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
    )


class Pipe:
    """A schedule with a loss function that is given anew for every pass."""

    def __init__(self, model: nn.Module, index: int, num_stages: int, group: Any) -> None:
        self._stage = PipelineStage(model, index, num_stages, CPU, group=group)
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
    return Layout(list(model.parameters()), pipe.backward, lambda place: index, [2, 3])


def mixed(seed: int) -> Layout:
    """FSDP2, but for the last layer, which is plain."""
    model = block(seed)
    plain = list(model[2].parameters())
    fully_shard(model, mesh=mesh_of((4,), ("shard",)), ignored_params=set(plain))
    return Layout(list(model.parameters()), averaged(own_data(model), plain))


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


BUILDERS: dict[str, Callable[[int], Layout]] = {
    "ddp": ddp,
    "fsdp1, flat": lambda seed: fsdp1(seed, use_orig_params=False),
    "fsdp1, use_orig_params": fsdp1,
    "fsdp1, hybrid": lambda seed: fsdp1(seed, hybrid=True),
    "fsdp2": fsdp2,
    "fsdp2, empty shards": lambda seed: fsdp2(seed, width=3),
    "fsdp2, reduced in fp16": lambda seed: fsdp2(seed, fp16=True),
    "fsdp2, cpu offload": lambda seed: fsdp2(seed, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp": lambda seed: fsdp2(seed, hybrid=True),
    "fsdp2 x tp, norms first": lambda seed: tensor_parallel(seed, norms_first=True),
    "fsdp2 x tp, norms last": lambda seed: tensor_parallel(seed, norms_first=False),
    "fsdp2 x ep, experts first": lambda seed: expert_parallel(seed, experts_first=True),
    "fsdp2 x ep, dense first": lambda seed: expert_parallel(seed, experts_first=False),
    "fsdp2 x pp": sharded_pipeline,
    "pipeline": pipeline,
    "plain beside sharded": mixed,
    "local experts": local_experts,
    "idle ranks": idle_ranks,
}
