"""Gradients to messages and back, in plain torch: the specification. Nothing here syncs the host or is a collective."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from distscale.fp8.recipe import Recipe
from distscale.fp8.rounding import round_stochastically
from distscale.fp8.scales import bits_of_amax, scale_of_amax
from distscale.fp8.wire import BLOCK, Layout, Segment

__all__ = ["Quantized", "dequantize", "quantize", "sum_rows"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_NAN_EXPONENT = 255


class Quantized(NamedTuple):
    """Messages, and what was seen of the values that they were made of."""

    messages: Tensor
    """uint8, shape (world_size, row_bytes)."""
    bits: Tensor
    """int32, shape (num_fp8,): amax bits over all rows, before the cast."""
    num_saturated: Tensor
    """int64, shape (num_fp8,): finite values that the agreed scale takes beyond the largest FP8 number."""


def quantize(rows: Tensor, layout: Layout, scale: Tensor, key: int | None = None) -> Quantized:
    """Makes a message of each row.

    Values beyond the scale saturate; inf and NaN become NaN. Where ``scale`` is 0, a tensor is scaled by its own amax.
    Blocks always are, by a power of two.

    Args:
        rows: fp32, bf16 or fp16, shape (world_size, row_numel).
        scale: fp32, shape (num_fp8,): agreed before, in the order of ``layout.in_fp8``.
        key: 32 bits, other ones for every call: rounds stochastically. None: to the nearest.
    """
    messages = rows.new_zeros(len(rows), layout.row_bytes, dtype=torch.uint8)
    messages[:, :4].view(torch.int32).fill_(layout.identity)
    bits: list[Tensor] = []
    num_saturated: list[Tensor] = []
    for segment in layout.segments:
        values = rows[:, segment.start : segment.stop]
        payload = messages[:, segment.offset : segment.offset + segment.num_bytes]
        if not segment.piece.is_fp8:
            payload.view(torch.bfloat16).copy_(values)
            continue
        values = values.float()
        agreed = scale[len(bits)]
        bits.append(bits_of_amax(values))
        if layout.is_blockwise:
            factors, exponents = _block_scales(values, layout)
            _scaling(messages, segment, segment.num_blocks).copy_(exponents)
            factors = factors.repeat_interleave(BLOCK, dim=1)[:, : segment.piece.numel]
        else:
            own = scale_of_amax(bits[-1].view(torch.float32), torch.finfo(layout.dtype).max, layout.recipe, 1.0)
            factors = torch.where(agreed > 0, agreed, own)
            _scaling(messages, segment, 4).view(torch.float32).copy_(factors.double().reciprocal())
        scaled = values * factors
        largest = torch.finfo(layout.dtype).max
        is_finite = values.abs() <= _FLOAT32_MAX
        beyond = (is_finite & (scaled.abs() > largest)).sum()
        num_saturated.append(beyond * (agreed > 0) * (not layout.is_blockwise))
        # Clamping alone would make inf finite.
        scaled = torch.where(is_finite, scaled.clamp(-largest, largest), torch.nan)
        if key is not None:
            scaled = round_stochastically(scaled, layout.dtype, _index(rows, segment), key)
        payload.copy_(scaled.to(layout.dtype).view(torch.uint8))
    none = torch.empty(0, dtype=torch.int64, device=rows.device)
    return Quantized(messages, torch.stack(bits) if bits else none.int(), torch.stack(num_saturated) if bits else none)


def dequantize(messages: Tensor, layout: Layout) -> Tensor:
    """The rows of some messages: fp32, shape (num_messages, row_numel)."""
    rows = torch.empty(len(messages), layout.row_numel, device=messages.device)
    for segment in layout.segments:
        out = rows[:, segment.start : segment.stop]
        payload = messages[:, segment.offset : segment.offset + segment.num_bytes]
        if not segment.piece.is_fp8:
            out.copy_(payload.view(torch.bfloat16))
        elif layout.is_blockwise:
            exponents = _scaling(messages, segment, segment.num_blocks)
            scale_inv = (exponents.int() << 23).view(torch.float32)
            scale_inv = torch.where(exponents == _NAN_EXPONENT, torch.nan, scale_inv)
            out.copy_(payload.view(layout.dtype))
            out *= scale_inv.repeat_interleave(BLOCK, dim=1)[:, : segment.piece.numel]
        else:
            out.copy_(payload.view(layout.dtype))
            out *= _scaling(messages, segment, 4).view(torch.float32)
    return rows


def sum_rows(messages: Tensor, layout: Layout, factor: float) -> Tensor:
    """The sum of what all ranks sent to this one, in fp32 and in the order of the ranks, times ``factor``.

    It is NaN if any message is of another layout.

    Args:
        messages: uint8, shape (world_size, row_bytes).

    Returns:
        fp32, shape (row_numel,).
    """
    total = torch.zeros(layout.row_numel, device=messages.device)
    for rank in range(len(messages)):
        total += dequantize(messages[rank : rank + 1], layout)[0]
    is_right = (messages[:, :4].view(torch.int32) == layout.identity).all()
    return torch.where(is_right, total * factor, torch.nan)


def _scaling(messages: Tensor, segment: Segment, num_bytes: int) -> Tensor:
    return messages[:, segment.scaling : segment.scaling + num_bytes]


def _block_scales(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The scale and the exponent of each block: fp32 and uint8, shape (world_size, num_blocks)."""
    blocks = pad(values, (0, -values.shape[1] % BLOCK)).view(len(values), -1, BLOCK)
    amax = blocks.abs().amax(dim=2)
    recipe: Recipe = replace(layout.recipe, power_of_two=True)
    scale = scale_of_amax(amax, torch.finfo(layout.dtype).max, recipe, 1.0)
    exponents = scale.reciprocal().view(torch.int32) >> 23
    return scale, torch.where(amax <= _FLOAT32_MAX, exponents, _NAN_EXPONENT)


def _index(rows: Tensor, segment: Segment) -> Tensor:
    """The place of each value of a segment in all rows: int64, shape (world_size, numel)."""
    first = torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1]
    return first + torch.arange(segment.start, segment.stop, device=rows.device)
