"""Gradients to messages and back, in the host's memory, by the native library: ``wire.cpp`` behind ctypes.

A call releases the GIL, and uses as many threads as torch would, where the values are worth it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distscale.fp8.wire import Layout
from distscale.fp8.wire_plan import code_of_key, new_results, plan
from distscale.fp8.wire_reference import Quantized
from distscale.sweep import cpu

__all__ = ["quantize", "sum_rows"]


def quantize(rows: Tensor, layout: Layout, scale: Tensor, key: int | None = None) -> Quantized:
    """See :func:`distscale.fp8.wire_reference.quantize`: one read of ``rows``, two of tensors without a scale."""
    rows, scale = rows.contiguous(), scale.contiguous()
    messages, bits, num_saturated = new_results(rows, layout)
    made = plan(layout)
    described = made.describe(len(rows), rows.dtype, *made.addresses)
    cpu.check(
        cpu.load().functions.distscale_quantize(
            described.ctypes.data,
            rows.data_ptr(),
            scale.data_ptr(),
            code_of_key(key),
            messages.data_ptr(),
            bits.data_ptr(),
            num_saturated.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return Quantized(messages, bits, num_saturated)


def sum_rows(messages: Tensor, layout: Layout, factor: float) -> Tensor:
    """See :func:`distscale.fp8.wire_reference.sum_rows`: one read of ``messages``, one write of the sum."""
    messages = messages.contiguous()
    total = torch.empty(layout.row_numel, dtype=torch.float32)
    made = plan(layout)
    described = made.describe(len(messages), total.dtype, *made.addresses)
    cpu.check(
        cpu.load().functions.distscale_sum_rows(
            described.ctypes.data,
            messages.data_ptr(),
            factor,
            total.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return total
