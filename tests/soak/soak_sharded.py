"""Layouts of data parallelism: each rank has data of its own, and gradients are reduced over all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from layout_models import block, let_fsdp1_offload
from soak_pieces import Layout, averaged, clip_by_torch, deferring, mesh_of, own_data
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = ["context_parallel", "ddp", "fsdp1", "fsdp2", "mixed"]


def ddp(seed: int) -> Layout:
    model = DistributedDataParallel(block(seed))
    params = list(model.parameters())
    return Layout(params, own_data(model), defer=model.no_sync, clip=clip_by_torch(params))


def fsdp1(
    seed: int,
    strategy: str = "FULL_SHARD",
    *,
    use_orig_params: bool = True,
    clips: bool = True,
    offload: bool = False,
) -> Layout:
    is_hybrid = strategy == "HYBRID_SHARD"
    if offload:
        let_fsdp1_offload()
    model = FullyShardedDataParallel(
        block(seed),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=offload),
        device_id=torch.device("cpu"),
        device_mesh=mesh_of((2, 2), ("replicate", "shard")) if is_hybrid else None,
    )
    shard = dist.get_rank() % 2 if is_hybrid else dist.get_rank()
    return Layout(
        list(model.parameters()),
        own_data(model),
        lambda index: shard,
        defer=model.no_sync,
        clip=model.clip_grad_norm_ if clips else None,
        is_fsdp1=True,
    )


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
        fsdp2=model,
    )


def mixed(seed: int) -> Layout:
    """FSDP2, but for the last layer, which is plain."""
    model = block(seed)
    plain = list(model[2].parameters())
    fully_shard(model, mesh=mesh_of((4,), ("shard",)), ignored_params=set(plain))
    return Layout(list(model.parameters()), averaged(own_data(model), plain), fsdp2=model)


def context_parallel(seed: int) -> Layout:
    """Each rank has its part of every sequence, and the whole model; the gradients are reduced by hand.

    Torch's own context parallelism is played once, in ``test_every_layout``: it takes half a second a step.
    """
    model = block(seed)
    params = list(model.parameters())
    return Layout(params, averaged(own_data(model), params), clip=clip_by_torch(params))
