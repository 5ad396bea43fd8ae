"""How a model lies over the ranks, and the optimizer that fits it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distscale.config import Config
from distscale.sections import TrainSection
from gpt import GPT

__all__ = ["DTYPES", "adamw", "distribute", "gradient_sync", "new_optimizer"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DDP_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


def distribute(model: GPT, config: Config) -> nn.Module:
    """Shards ``model`` in place (fsdp2) or wraps it (ddp), and returns what to call for a loss. Collective: yes."""
    precision = config.precision
    if config.parallel.layout == "ddp":
        replica = DistributedDataParallel(model)
        if precision.reduce_dtype in DDP_HOOKS:
            replica.register_comm_hook(None, DDP_HOOKS[precision.reduce_dtype])
        return replica
    policy = MixedPrecisionPolicy(DTYPES[precision.dtype], DTYPES[precision.reduce_dtype])
    # Said explicitly, since torch's default is a mesh of GPUs wherever there are any.
    mesh = init_device_mesh(model.token.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def gradient_sync(replica: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Around the forward and backward pass of a micro-batch: gradients are reduced after the last one alone."""
    if isinstance(replica, DistributedDataParallel):
        return nullcontext() if is_last else replica.no_sync()
    assert isinstance(replica, FSDPModule)
    replica.set_requires_gradient_sync(is_last)
    return nullcontext()


def adamw(model: nn.Module, train: TrainSection) -> torch.optim.AdamW:
    """Returns the optimizer of all runs, which decays matrices alone."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=train.betas,
        fused=train.fused,
    )


def new_optimizer(model: nn.Module, train: TrainSection) -> torch.optim.AdamW:
    """Returns AdamW with its state already there, as its first step would have made it.

    Reading the state of an optimizer without any makes torch run a step on zero gradients, after which AdamW
    believes itself one step older: a run stopped while still overflowing would not resume bitwise.
    """
    optimizer = adamw(model, train)
    for param in model.parameters():
        optimizer.state[param] = {
            "step": torch.zeros((), device=param.device if train.fused else "cpu"),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    return optimizer
