"""DDP and FSDP1: communication hooks that reduce gradients in FP8."""

# No postponed annotations: DDP checks those of its hook.

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from distscale.errors import ConfigError
from distscale.fp8.sender import Sender, SenderMaker
from distscale.fp8.wire import Piece

__all__ = ["hook_ddp", "hook_fsdp1"]

_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
_FLAT = "flat parameters"


# ---------------------------------------------------------------- DDP


class _Buckets:
    """State of the hook of a DDP model.

    DDP makes its buckets anew after the first iteration, so nothing is kept by bucket.
    """

    def __init__(self, model: DistributedDataParallel, sender: Sender, names: Mapping[nn.Parameter, str]) -> None:
        self.group: dist.ProcessGroup = model.process_group
        self.sender = sender
        self.pieces = {
            param: Piece(name, -(-param.numel() // self.group.size()), name in sender.names)
            for param, name in names.items()
        }
        self.stream: Any = None
        """On CUDA, of its own, so that the backward pass goes on."""

    def reduce(self, bucket: Any) -> None:
        """Replaces the gradients in a bucket by their averages over the ranks: the same bits on all of them."""
        world_size = self.group.size()
        if world_size == 1:
            return
        gradients: Sequence[Tensor] = bucket.gradients()
        pieces = [self.pieces[param] for param in bucket.parameters()]
        places = [gradient.view(-1) for gradient in gradients]
        shares = [
            pad(place, (0, world_size * piece.numel - place.numel())).view(world_size, piece.numel)
            for place, piece in zip(places, pieces, strict=True)
        ]
        row = self.sender.reduce(torch.cat(shares, dim=1), pieces, self.group, 1.0 / world_size)
        rows = self.sender.gather(row, pieces, self.group, bucket.buffer().dtype)
        averages = rows.split_with_sizes([piece.numel for piece in pieces], dim=1)
        for place, average in zip(places, averages, strict=True):
            place.copy_(average.reshape(-1)[: place.numel()])


def _reduce_bucket(
    state: _Buckets,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    done: Future[Tensor]
    if buffer.device.type != "cuda":
        state.reduce(bucket)
        done = Future()
        done.set_result(buffer)
        return done
    cuda: Any = torch.cuda  # of which not all is typed
    state.stream = state.stream or cuda.Stream(buffer.device)
    state.stream.wait_stream(cuda.current_stream(buffer.device))
    done = Future(devices=[buffer.device])
    with cuda.stream(state.stream):
        state.reduce(bucket)
        done.set_result(buffer)  # who waits for it waits for the stream
    return done


def hook_ddp(model: DistributedDataParallel, names: Mapping[nn.Parameter, str], make: SenderMaker) -> None:
    """Registers the hook of a DDP model.

    Args:
        names: of the parameters of the model within.
        make: called with those that have gradients.

    Raises:
        ConfigError: if the model has a hook already, or sparse gradients, which DDP gives to no hook.
    """
    if model._comm_hooks:
        raise ConfigError("this DDP model has a communication hook already, and can have only one")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"the embedding {name or type(module).__name__} has sparse gradients, which cannot be sent in FP8: "
                "make it with sparse=False"
            )
    sender = make({name: param for param, name in names.items() if param.requires_grad})
    model.register_comm_hook(_Buckets(model, sender, names), _reduce_bucket)


# ---------------------------------------------------------------- FSDP1


class _Flat:
    """State of the hook of an FSDP1 model, which is told neither whose gradients come nor where each begins."""

    def __init__(self, group: dist.ProcessGroup, sender: Sender) -> None:
        self.group = group
        self.sender = sender


def _reduce_flat(state: _Flat, unsharded: Tensor, shard: Tensor) -> None:
    piece = Piece(_FLAT, shard.numel(), is_fp8=True)
    rows = unsharded.view(state.group.size(), -1)
    shard.copy_(state.sender.reduce(rows, [piece], state.group, 1.0 / state.group.size()))


def hook_fsdp1(model: FullyShardedDataParallel, make: SenderMaker) -> None:
    """Registers the hook of an FSDP1 model, in blocks; none at world size 1, where torch shards nothing.

    Raises:
        ConfigError: if a unit is not sharded, or hybrid, or has a process group or a hook of its own.
    """
    group = model.process_group
    assert group is not None
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and group.size() > 1:
            state: Any = unit
            where = f"the FSDP1 unit {name or type(unit.module).__name__}"
            if state.sharding_strategy not in _SHARDED:
                raise ConfigError(
                    f"{where} is of {state.sharding_strategy}, for which torch has no such hook: use FULL_SHARD, "
                    "SHARD_GRAD_OP, DDP or FSDP2"
                )
            if state._comm_hook is not None:
                raise ConfigError(f"{where} has a communication hook already, and can have only one")
            if state.process_group != group:
                raise ConfigError(f"{where} has another process group than the model, and the hook is not told which")
    sender = make({_FLAT: nn.Parameter(torch.empty(0, device="meta"))})
    if group.size() > 1:
        model.register_comm_hook(_Flat(group, sender), _reduce_flat)
