"""The matrix products of a linear layer, forward and backward, of FP8 numbers by ``torch._scaled_mm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from distscale.fp8.cast import cast, quantize
from distscale.fp8.meter import Meter
from distscale.fp8.recipe import Recipe

__all__ = ["GRAD_OUTPUT", "INPUT", "WEIGHT", "Fp8Product"]

INPUT, WEIGHT, GRAD_OUTPUT = range(3)
"""Places in the meter of a linear layer."""
_TILE = 16
"""CUDA wants the sizes of the second operand to be multiples of it."""


class Fp8Product(torch.autograd.Function):
    """``input @ weight.t()``, and its two gradients, from FP8 casts of ``input``, ``weight`` and the output's gradient.

    What is saved for the backward pass is the FP8 input, and the weight as it is: an FP8 copy of it would outlive the
    unsharded weight that FSDP frees after the forward pass. It is cast again, by the same scale.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, meter: Meter, recipe: Recipe, records: bool) -> Tensor:
        """Multiplies.

        Args:
            input: fp32, fp16 or bf16, shape (num_tokens, in_features), on the device of ``weight`` and ``meter``.
            weight: the same dtypes, shape (out_features, in_features).
            meter: of ``INPUT``, ``WEIGHT`` and ``GRAD_OUTPUT``.
            records: whether amax values count, those of the backward pass too.

        Returns:
            Dtype of ``input``, shape (num_tokens, out_features). Gradients have the dtypes of ``input`` and ``weight``.
        """
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        fp8_input, input_scale = quantize(input, meter, INPUT, recipe, records)
        fp8_weight, weight_scale = quantize(weight, meter, WEIGHT, recipe, records)
        ctx.save_for_backward(
            fp8_input if needs_weight else None, input_scale, weight if needs_input else None, weight_scale
        )
        ctx.meter, ctx.recipe, ctx.records = meter, recipe, records
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
        return _multiply(fp8_input, fp8_weight, input_scale, weight_scale, input.dtype, is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        fp8_input, input_scale, weight, weight_scale = ctx.saved_tensors
        grad, grad_scale = quantize(grad_output, ctx.meter, GRAD_OUTPUT, ctx.recipe, ctx.records)
        grad_input = grad_weight = None
        if weight is not None:
            fp8_weight = cast(weight, weight_scale, ctx.recipe.dtype_of(ctx.meter.tensors[WEIGHT]))
            grad_input = _multiply(grad, fp8_weight.t(), grad_scale, weight_scale, ctx.input_dtype)
        if fp8_input is not None:
            grad_weight = _multiply(grad.t(), fp8_input.t(), grad_scale, input_scale, ctx.weight_dtype)
        return grad_input, grad_weight, None, None, None


def _multiply(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, is_forward: bool = False
) -> Tensor:
    """``left @ right.t()`` without the scales: ``dtype``, shape (m, n), of FP8 matrices of shapes (m, k) and (n, k).

    Zeros fill sizes up to what CUDA takes; a CPU would take any. Empty matrices are none that it takes.
    """
    (m, k), n = left.shape, len(right)
    if 0 in (m, k, n):
        return torch.zeros(m, n, dtype=dtype, device=left.device)
    more_k, more_n = -k % _TILE, -n % _TILE
    product: Tensor = torch._scaled_mm(
        _padded(left, 0, more_k),
        _padded(right, more_n, more_k).t(),
        scale_a=left_scale.reciprocal(),
        scale_b=right_scale.reciprocal(),
        out_dtype=dtype,
        # Sums of less than 32 bits on Hopper: enough for activations, not for gradients.
        use_fast_accum=is_forward,
    )
    return product[:, :n].clone() if more_n else product


def _padded(matrix: Tensor, more_rows: int, more_columns: int) -> Tensor:
    """Contiguous, with zeros below and on the right."""
    matrix = matrix.contiguous()
    if more_rows or more_columns:
        # The byte of an FP8 zero is 0.
        matrix = pad(matrix.view(torch.uint8), (0, more_columns, 0, more_rows)).view(matrix.dtype)
    return matrix
