"""The layouts that are played, by name: how each is built, and what can be drawn for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from soak_parallel import (
    expert_parallel,
    idle_ranks,
    local_experts,
    pipeline,
    sequence_and_tensor_parallel,
    sharded_pipeline,
    three_dimensional,
)
from soak_pieces import Layout
from soak_sharded import context_parallel, ddp, fsdp1, fsdp2, mixed
from torch.distributed.fsdp import CPUOffloadPolicy

__all__ = ["LAYOUTS", "Kind"]

LOOP = ("sgd-momentum", "adamw-loop")
"""For plain tensors and DTensors, or DTensors of several meshes: torch's foreach and fused operators do not take them
together."""
DTENSOR = (*LOOP, "adamw-foreach", "adamw-fused")
"""Torch has no fused SGD for DTensors."""
FUSED = ("adamw-fused", "sgd-momentum-fused")
ANY = (*DTENSOR, "sgd-momentum-fused")


class Kind(NamedTuple):
    build: Callable[[int], Layout]
    """Given a seed, on every rank."""
    optimizers: tuple[str, ...]
    num_ranks: int = 4
    may_unscale: bool = True
    overflows_by_itself: bool = False
    """So that not all that is bad was put in."""


LAYOUTS: dict[str, Kind] = {
    "ddp": Kind(ddp, ANY),
    "context parallel": Kind(context_parallel, ANY),
    "fsdp1, flat": Kind(lambda seed: fsdp1(seed, use_orig_params=False), ANY),
    "fsdp1, use_orig_params": Kind(fsdp1, ANY),
    "fsdp1, fused and not unscaled": Kind(lambda seed: fsdp1(seed, clips=False), FUSED, may_unscale=False),
    "fsdp1, shard_grad_op": Kind(lambda seed: fsdp1(seed, "SHARD_GRAD_OP"), ANY),
    # With use_orig_params, where the device is the CPU too, FSDP1 adds to the offloaded gradient of the step before.
    "fsdp1, cpu offload": Kind(lambda seed: fsdp1(seed, use_orig_params=False, offload=True), ANY),
    "fsdp1, hybrid": Kind(lambda seed: fsdp1(seed, "HYBRID_SHARD"), ANY),
    "fsdp2": Kind(fsdp2, DTENSOR),
    "fsdp2, empty shards": Kind(lambda seed: fsdp2(seed, width=3), DTENSOR),
    "fsdp2, reduced in fp16": Kind(lambda seed: fsdp2(seed, fp16=True), DTENSOR, overflows_by_itself=True),
    "fsdp2, cpu offload": Kind(lambda seed: fsdp2(seed, offload_policy=CPUOffloadPolicy(pin_memory=False)), DTENSOR),
    "hsdp": Kind(lambda seed: fsdp2(seed, hybrid=True), DTENSOR),
    "fsdp2 x tp, norms first": Kind(lambda seed: sequence_and_tensor_parallel(seed, norms_first=True), LOOP),
    "fsdp2 x tp, norms last": Kind(lambda seed: sequence_and_tensor_parallel(seed, norms_first=False), LOOP),
    "fsdp2 x ep, experts first": Kind(lambda seed: expert_parallel(seed, experts_first=True), LOOP),
    "fsdp2 x ep, dense first": Kind(lambda seed: expert_parallel(seed, experts_first=False), LOOP),
    "fsdp2 x pp": Kind(sharded_pipeline, DTENSOR),
    "fsdp2 x tp x pp": Kind(three_dimensional, LOOP, num_ranks=8),
    "pipeline": Kind(pipeline, ANY),
    "plain beside sharded": Kind(mixed, LOOP),
    "local experts": Kind(local_experts, ANY),
    "idle ranks": Kind(idle_ranks, ANY),
}
