"""The optimizers of ZeRO 1, 2 and 3: gradients in partitions, in flat buffers if they are offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from distscale.integrations.deepspeed.surfaces import Answer, Gradient, Surface, counts

__all__ = ["ZeRO3", "ZeRO12"]


class ZeRO12(Surface):
    """ZeRO stages 1 and 2, with the optimizer's state on the device or offloaded."""

    needs = MappingProxyType(
        {
            "has_overflow": ("partition_gradients",),
            "scaled_global_norm": ("norm_type",),
            "override_loss_scale": ("loss_scale",),
            "set_norm_for_param_grad_in_gpu": ("param",),
            "update_offload_overflow_tracker_for_param_grad": ("param",),
            "get_param_id": ("param",),
        }
    )
    groups = "bit16_groups"

    def gradients(self) -> Iterator[Gradient]:
        optimizer = self.optimizer
        for group, params in enumerate(optimizer.params_in_partition):
            if optimizer.cpu_offload:
                yield from self._offloaded(group, params)
                continue
            grads = optimizer.averaged_gradients.get(group) or ()
            whole = (grad for grad in grads if not getattr(grad, "_zero_padding", False))
            # Older releases pad at the end, without a mark.
            for param, grad in zip(params, whole, strict=False):
                yield Gradient(param, grad, counts(optimizer, param))

    def _offloaded(self, group: int, params: Sequence[Tensor]) -> Iterator[Gradient]:
        optimizer = self.optimizer
        flat = optimizer.single_partition_of_fp32_groups[group].grad
        for param in params if flat is not None else ():
            key = optimizer.get_param_id(param)
            _, first, start, numel = optimizer.grad_position[key]
            grad = flat.view(-1).narrow(0, start, numel)
            if key not in optimizer.norm_for_param_grads:  # no part in the last micro-batch: this is of an earlier step
                _put_right(grad, optimizer.accumulated_grads_in_cpu.get(key), first)
            yield Gradient(param, grad, counts(optimizer, param))

    def install(self, answer: Callable[[], Answer]) -> None:
        optimizer = self.optimizer
        optimizer.has_overflow = lambda partition_gradients=True: answer().skip
        optimizer.scaled_global_norm = lambda norm_type=2: answer().scaled_norm
        if optimizer.cpu_offload:
            # Checked during backward, with a host sync for every parameter; the sweep reads what was offloaded.
            optimizer.update_offload_overflow_tracker_for_param_grad = lambda param: None
            optimizer.set_norm_for_param_grad_in_gpu = self._note
            if hasattr(optimizer, "update_offload_overflow_tracker"):
                optimizer.update_offload_overflow_tracker = lambda grad: None

    def _note(self, param: Tensor) -> None:
        self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(param)] = None

    def clean_up(self, is_skipped: bool) -> None:
        if self.optimizer.cpu_offload:
            # What is next used in a later micro-batch only is added to what is there.
            for grad in self.optimizer.accumulated_grads_in_cpu.values():
                grad.zero_()


class ZeRO3(Surface):
    """ZeRO stage 3, with the optimizer's state and the parameters on the device or offloaded to the CPU."""

    needs = MappingProxyType(
        {
            "has_overflow": ("partition_gradients",),
            "_get_norm_groups": (),
            "_pre_step": (),
            "override_loss_scale": ("loss_scale",),
            "_constant_buffered_norm2": ("input", "buffer_size"),
            "get_param_id": ("param",),
        }
    )
    groups = "fp16_groups"

    def gradients(self) -> Iterator[Gradient]:
        optimizer = self.optimizer
        first = 0  # in the buffer that gradients are accumulated in, one parameter of all groups after the other
        for group, params in enumerate(optimizer.fp16_groups):
            if not optimizer.offload_optimizer:
                # Held in a list a group; a parameter that is not trained has zeros there.
                for param, grad in zip(params, optimizer.averaged_gradients.get(group) or (), strict=False):
                    yield Gradient(param, grad, self._counts(params, param))
                continue
            flat = optimizer.fp32_partitioned_groups_flat[group].grad
            for param in params:
                key = optimizer.get_param_id(param)
                if flat is not None:
                    _, start, numel = optimizer.grad_position[key]
                    grad = flat.narrow(0, start, numel)
                    if key not in optimizer.norm_for_param_grads:  # as in ZeRO 1 and 2
                        _put_right(grad, optimizer.grad_partitions_flat_buffer, first)
                    yield Gradient(param, grad, self._counts(params, param))
                first += param.partition_numel()

    def install(self, answer: Callable[[], Answer]) -> None:
        optimizer = self.optimizer
        pre_step = optimizer._pre_step

        def decide_first() -> None:
            pre_step()
            # Releases before 0.19 ask only in FP16, and in BF16 go by what is left here.
            optimizer.overflow = answer().skip

        optimizer._pre_step = decide_first
        optimizer.has_overflow = lambda partition_gradients=True: answer().skip
        optimizer._get_norm_groups = lambda: [answer().scaled_norm]
        if optimizer.offload_optimizer:
            optimizer._constant_buffered_norm2 = lambda input, buffer_size=0: torch.zeros(())

    def clean_up(self, is_skipped: bool) -> None:
        # A parameter that has no part in the next backward pass would be stepped on what is there.
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def _counts(self, params: Sequence[Tensor], param: Tensor) -> float:
        everywhere = getattr(self.optimizer, "_grad_norm_counts_every_rank", None)
        if everywhere is not None and everywhere(params, self.optimizer._get_param_partition_group(params[0])):
            return 1.0
        return counts(self.optimizer, param)


def _put_right(grad: Tensor, accumulated: Tensor | None, first: int) -> None:
    """Fills an offloaded gradient with what earlier micro-batches of this step have left in a buffer, if any has."""
    if accumulated is None:
        grad.zero_()
    elif accumulated.data_ptr() != grad.data_ptr():  # they are one with low-precision masters
        grad.copy_(accumulated.view(-1).narrow(0, first, grad.numel()))
