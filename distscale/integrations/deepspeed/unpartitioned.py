"""The optimizers that have full gradients on every rank: stage 0 in FP16, and ``BF16_Optimizer``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from distscale.integrations.deepspeed.surfaces import Answer, Gradient, Surface, counts

__all__ = ["BF16", "FP16"]


class BF16(Surface):
    """DeepSpeed's ``BF16_Optimizer``: full gradients in fp32 on every rank, and partitioned state."""

    needs = MappingProxyType(
        {
            "step": ("closure",),
            "get_grads_for_norm": ("for_clipping",),
            "clear_hp_grads": (),
            "clear_lp_grads": ("set_to_none",),
        }
    )
    groups = "bf16_groups"

    def gradients(self) -> Iterator[Gradient]:
        optimizer = self.optimizer
        for group, params in enumerate(optimizer.bf16_groups):
            replicas = dist.get_world_size(optimizer.real_dp_process_group[group])
            for index, param in enumerate(params):
                if optimizer.fp32_groups_has_gradients[group][index]:
                    grad = optimizer.fp32_groups_gradients[group][index]
                    yield Gradient(param, grad, counts(optimizer, param) / replicas)

    def install(self, answer: Callable[[], Answer]) -> None:
        optimizer = self.optimizer
        step, for_norm = optimizer.step, optimizer.get_grads_for_norm

        def step_or_skip(closure: Any = None) -> None:
            optimizer.overflow = answer().skip
            if optimizer.overflow:
                optimizer._global_grad_norm = float("inf")
                optimizer.clear_hp_grads()
                optimizer.clear_lp_grads()
            else:
                step(closure)

        def norm_instead(for_clipping: bool = False) -> Any:
            if for_clipping:
                return for_norm(for_clipping=True)
            # It takes the norm of what it gets, over its model-parallel ranks: one of them has it, the others nothing.
            is_first = optimizer.mpu is None or dist.get_rank(optimizer.mpu.get_model_parallel_group()) == 0
            norm = answer().scaled_norm.float().to(optimizer.fp32_groups_flat_partition[0].device).reshape(1)
            return [norm if is_first else torch.zeros_like(norm)], {}

        optimizer.step = step_or_skip
        optimizer.get_grads_for_norm = norm_instead


class FP16(Surface):
    """Stage 0: DeepSpeed's ``FP16_Optimizer`` and ``FP16_UnfusedOptimizer``, whose gradients are on every rank.

    They form a norm inside ``step``, of gradients that are the same on all data-parallel ranks, and leave out those of
    experts; they clip by ours.
    """

    needs = MappingProxyType(
        {"step": ("closure",), "override_loss_scale": ("loss_scale",), "unscale_and_clip_grads": ()}
    )
    groups = "fp16_groups"

    def gradients(self) -> Iterator[Gradient]:
        for params in self.optimizer.fp16_groups:
            for param in params:
                if param.grad is not None:
                    grad = param.grad.coalesce()._values() if param.grad.is_sparse else param.grad
                    yield Gradient(param, grad.detach(), counts(self.optimizer, param) / _num_replicas(param))

    def install(self, answer: Callable[[], Answer]) -> None:
        checker = self.optimizer.overflow_checker
        checker.has_overflow = lambda params=None, has_moe_params=None: answer().skip
        checker.check = lambda param_groups=None: answer().skip
        checker.check_using_norm = lambda norm_group, reduce_overflow=True: answer().skip
        unscale_and_clip = self.optimizer.unscale_and_clip_grads
        takes = inspect.signature(unscale_and_clip)

        def clip_by_ours(*args: Any, **kwargs: Any) -> Any:
            given = takes.bind(*args, **kwargs).arguments
            masters = [param for group in getattr(self.optimizer, "fp32_groups", ()) for param in group]
            # DeepSpeed multiplies the data of a sparse gradient, which leaves the gradient as it is.
            sparse = [(param, param.grad) for param in masters if param.grad is not None and param.grad.is_sparse]
            for param, _ in sparse:
                param.grad = None
            combined_scale = unscale_and_clip(**given | {"total_norm": answer().scaled_norm})
            for param, grad in sparse:
                param.grad = grad * (1.0 / float(combined_scale))
            return combined_scale

        self.optimizer.unscale_and_clip_grads = clip_by_ours

    def clean_up(self, is_skipped: bool) -> None:
        if is_skipped:
            self.optimizer.zero_grad()  # in 0.18.0 nothing else does, in BF16


def _num_replicas(param: Any) -> int:
    """Over how many data-parallel ranks a gradient is averaged at stage 0."""
    from deepspeed.utils import groups

    if not getattr(param, "allreduce", True):
        return int(groups._get_expert_data_parallel_world_size(param.group_name))
    return int(groups._get_sequence_data_parallel_world_size())
