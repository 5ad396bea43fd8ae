"""Gradients to messages and back, by the fastest code that there is for a device.

Both functions give the bits of :mod:`distscale.fp8.wire_reference`, but for those of a NaN; as native code keeps
subnormal numbers, also where torch was told to flush them to zero. The environment variable ``DISTSCALE_SWEEP`` chooses
as it does for the sweep.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distscale.fp8 import wire_cpu, wire_cuda, wire_reference
from distscale.fp8.wire import Layout
from distscale.fp8.wire_plan import ROW_DTYPES
from distscale.fp8.wire_reference import Quantized
from distscale.sweep.choice import choose

__all__ = ["quantize", "sum_rows"]


class _Backend(Protocol):
    """See :mod:`distscale.fp8.wire_reference`."""

    def quantize(self, rows: Tensor, layout: Layout, scale: Tensor, key: int | None = None) -> Quantized: ...

    def sum_rows(self, messages: Tensor, layout: Layout, factor: float) -> Tensor: ...


def quantize(rows: Tensor, layout: Layout, scale: Tensor, key: int | None = None) -> Quantized:
    """Makes a message of each row; see :func:`distscale.fp8.wire_reference.quantize`.

    Collective: no. Syncs host: only where a layout is new on a GPU.
    """
    backend = _backend_for(rows.device) if rows.dtype in ROW_DTYPES else wire_reference
    return backend.quantize(rows, layout, scale, key)


def sum_rows(messages: Tensor, layout: Layout, factor: float) -> Tensor:
    """Sums the messages that arrived; see :func:`distscale.fp8.wire_reference.sum_rows`.

    Collective: no. Syncs host: only where a layout is new on a GPU.
    """
    return _backend_for(messages.device).sum_rows(messages, layout, factor)


def _backend_for(device: torch.device) -> _Backend:
    if choose(device).name == "reference":
        return wire_reference
    return wire_cpu if device.type == "cpu" else wire_cuda
