"""Gradients to messages and back on an NVIDIA GPU, by ``wire.cu``: two launches to quantize, of which the first is over
at once where all scales are known, and one to sum.

All of it happens on torch's current stream of the device, in torch's memory. What depends on the layout alone is sent
to the GPU when it is first used, so that a CUDA graph can capture the launches then.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distscale.errors import ProtocolError
from distscale.fp8.wire import Layout
from distscale.fp8.wire_plan import Plan, code_of_key, new_results, plan
from distscale.fp8.wire_reference import Quantized
from distscale.sweep import cuda, nvrtc

__all__ = ["WIRE", "load", "quantize", "sum_rows"]

_OWN, _SWEEP = Path(__file__).parent, Path(nvrtc.__file__).parent
WIRE = nvrtc.Program(
    (_OWN / "wire.cu", _OWN / "quad.cuh", _OWN / "wire.h", _SWEEP / "packed.cuh", _SWEEP / "numerics.h"),
    ("find_amax", "quantize", "sum_rows"),
)


@lru_cache(maxsize=64)
def load(device: torch.device) -> cuda.Gpu:
    """Loads the kernels for ``device``, compiled now or at another time.

    Raises:
        Unavailable: if they cannot be compiled, or the driver does not take them.
    """
    return cuda.open_gpu(device, WIRE)


def quantize(rows: Tensor, layout: Layout, scale: Tensor, key: int | None = None) -> Quantized:
    """See :func:`distscale.fp8.wire_reference.quantize`: one read of ``rows``, two of tensors without a scale.

    Raises:
        ProtocolError: if a CUDA graph is being captured, and the layout was not used before.

    Collective: no. Syncs host: only where the layout is new.
    """
    gpu = load(rows.device)
    rows, scale = rows.contiguous(), scale.contiguous()
    messages, bits, num_saturated = new_results(rows, layout)
    sent = _sent(gpu, layout, len(rows), rows.dtype)
    of_rows = (sent.described.data_ptr(), rows.data_ptr(), scale.data_ptr())
    if layout.in_fp8 and not layout.is_blockwise:
        gpu.launch("find_amax", _num_blocks(gpu, "find_amax", sent, len(rows)), *of_rows, bits.data_ptr())
    gpu.launch(
        "quantize",
        _num_blocks(gpu, "quantize", sent, len(rows)),
        *of_rows,
        code_of_key(key),
        messages.data_ptr(),
        bits.data_ptr(),
        num_saturated.data_ptr(),
    )
    return Quantized(messages, bits, num_saturated)


def sum_rows(messages: Tensor, layout: Layout, factor: float) -> Tensor:
    """See :func:`distscale.fp8.wire_reference.sum_rows`: one read of ``messages``, one write of the sum.

    Raises, collective, syncs host: as :func:`quantize`.
    """
    gpu = load(messages.device)
    messages = messages.contiguous()
    total = torch.empty(layout.row_numel, dtype=torch.float32, device=messages.device)
    sent = _sent(gpu, layout, len(messages), total.dtype)
    gpu.launch(
        "sum_rows",
        _num_blocks(gpu, "sum_rows", sent, 1),
        sent.described.data_ptr(),
        messages.data_ptr(),
        float(factor),
        total.data_ptr(),
    )
    return total


class _Sent(NamedTuple):
    """A layout on the device."""

    described: Tensor
    segments: Tensor
    chunks: Tensor
    num_chunks: int


_in_graphs: list[_Sent] = []
"""Layouts that captured graphs read again, whatever is sent until then."""


def _sent(gpu: cuda.Gpu, layout: Layout, num_rows: int, row_dtype: torch.dtype) -> _Sent:
    sent = _send(gpu, plan(layout), num_rows, row_dtype)
    if gpu.is_capturing():
        _in_graphs.append(sent)
    return sent


@lru_cache(maxsize=1024)
def _send(gpu: cuda.Gpu, made: Plan, num_rows: int, row_dtype: torch.dtype) -> _Sent:
    if gpu.is_capturing():
        raise ProtocolError(
            "a CUDA graph is being captured, and gradients of these parameters were not sent before:"
            " run the step once before the capture, as torch.cuda.graph asks for anyway"
        )
    # Later calls may be on other streams, which do not wait for this one.
    segments, chunks = gpu.send(made.segments, wait=True), gpu.send(made.chunks, wait=True)
    described = made.describe(num_rows, row_dtype, segments.data_ptr(), chunks.data_ptr())
    return _Sent(gpu.send(described, wait=True), segments, chunks, len(made.chunks))


def _num_blocks(gpu: cuda.Gpu, kernel: str, sent: _Sent, num_rows: int) -> int:
    return max(min(gpu.num_blocks(kernel), sent.num_chunks * num_rows), 1)
