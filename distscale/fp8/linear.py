"""Fp8Linear: a linear layer whose three matrix products are done in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distscale.errors import ConfigError
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.meter import Meter, Metered
from distscale.fp8.product import Fp8Product
from distscale.fp8.recipe import Recipe
from distscale.integrations.pipelining import is_dry_run
from distscale.shards import is_dtensor

__all__ = ["Fp8Linear"]


class Fp8Linear(nn.Linear):
    """``nn.Linear`` with its own parameters, which multiplies in FP8; made by :func:`~distscale.fp8.convert_to_fp8`.

    Parameters, gradients, output and bias keep their dtypes. The dtype of the output is that of the input, or that of
    autocast where it is on. Amax values count in training mode with gradients enabled, and not else; nor in the dry run
    of a pipeline stage, unless the stage is compiled.
    """

    meter: Meter
    recipe: Recipe

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("an Fp8Linear is not made by itself: give a model with nn.Linear to convert_to_fp8()")

    @staticmethod
    def tensors(name: str) -> list[Metered]:
        """What a layer of this name has in FP8."""
        return [Metered(f"{name}.input", False), Metered(f"{name}.weight", False), Metered(f"{name}.grad_output", True)]

    @staticmethod
    def replace(linear: nn.Linear, name: str, scales: Fp8Scales) -> None:
        """Makes an ``nn.Linear`` an Fp8Linear: the same object, with its parameters and hooks.

        Args:
            name: the same on all ranks.

        Raises:
            ConfigError: if another tensor has its names.
        """
        linear.meter = scales.meter(Fp8Linear.tensors(name))  # type: ignore[assignment]
        linear.recipe = scales.recipe  # type: ignore[assignment]
        linear.__class__ = Fp8Linear
        assert isinstance(linear, Fp8Linear)
        linear._move_meter()

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies; for shards of a tensor-parallel weight, on the shards.

        Args:
            input: fp32, fp16 or bf16, that of the weight or another one, since both are cast; shape (..., in_features).
                A DTensor if the weight is one.

        Raises:
            ValueError: if ``input`` is not of floating point, or has another number of features.
        """
        if not input.is_floating_point():
            raise ValueError(f"an Fp8Linear got an input of {input.dtype}: convert it to fp32, fp16 or bf16 before")
        if input.shape[-1:] != self.weight.shape[1:]:
            raise ValueError(f"an Fp8Linear of {self.in_features} features got an input of shape {tuple(input.shape)}")
        device = input.device.type
        if device == "meta":
            # Nothing is multiplied there, and a meter that went along would lose its values.
            return super().forward(input).to(input.dtype)
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        if is_dtensor(self.weight):
            from distscale.fp8.tensor_parallel import multiply_shards

            return multiply_shards(input, self.weight, self.bias, self._multiply)
        output = self._multiply(input, self.weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _multiply(self, input: Tensor, weight: Tensor) -> Tensor:
        self.meter.move(input.device)
        records = self.training and torch.is_grad_enabled() and (torch.compiler.is_compiling() or not is_dry_run())
        tokens = input.reshape(input.shape[:-1].numel(), input.shape[-1])
        output: Tensor = Fp8Product.apply(  # type: ignore[no-untyped-call]
            tokens, weight, self.meter, self.recipe, records
        )
        # As in nn.Linear the output is no view, of which FSDP would warn.
        shaped: Tensor = torch.ops.aten._unsafe_view(output, [*input.shape[:-1], len(weight)])
        return shaped

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move_meter()
        return self

    def _move_meter(self) -> None:
        if self.weight.device.type != "meta":
            self.meter.move(self.weight.device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"
