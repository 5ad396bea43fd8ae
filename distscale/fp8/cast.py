"""The cast to FP8: with a scale, and without making anything finite that is not.

By the native code of gradients on the wire, as a message of one tensor, whose amax is found in the same read; but by
torch's operators where ``torch.compile`` fuses them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter

from distscale.fp8 import wire_kernels
from distscale.fp8.meter import Meter
from distscale.fp8.recipe import CurrentScaling, Recipe
from distscale.fp8.scales import bits_of_amax, scale_of_amax
from distscale.fp8.wire import Layout, Piece, make_layout
from distscale.fp8.wire_plan import ROW_DTYPES

__all__ = ["cast", "cast_by_own_amax", "quantize"]

_PLAIN = {Tensor, Parameter}
"""Subclasses may keep their values elsewhere, or not have them yet."""
_MODES = torch._C._TorchDispatchModeKey
_TRACERS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
"""Modes in which new tensors have no memory, or each operator is to be seen."""


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 of ``values * scale``, rounded to the nearest, and to the largest number of the format where beyond it.

    inf and NaN become NaN: E4M3 has no inf, and torch's own cast makes 448 of it. Syncs host: no.

    Args:
        values: fp64, fp32, fp16 or bf16, any shape.
        scale: fp32, shape (), positive.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        ``dtype``, shape of ``values``.
    """
    if _is_native(values):
        return _natively(values, scale, dtype, CurrentScaling())[0]
    largest = torch.finfo(dtype).max
    # A product may be infinite by an old scale; only what was infinite before it is to stay so.
    scaled = (values.float() * scale).clamp(-largest, largest)
    return torch.where(values.isfinite(), scaled, torch.nan).to(dtype)


def quantize(values: Tensor, meter: Meter, index: int, recipe: Recipe, records: bool) -> tuple[Tensor, Tensor]:
    """Casts one tensor of a meter by its scale, or by its own amax as long as that is unknown. Syncs host: no.

    Args:
        values: fp64, fp32, fp16 or bf16, any shape, on the device of ``meter``.
        index: which tensor of ``meter`` it is.
        records: whether its amax counts for later steps.

    Returns:
        FP8 values and the scale that they carry, fp32, shape (). Without a history, a tensor of zeros alone, or one
        with inf or NaN, is scaled by 1.
    """
    dtype = recipe.dtype_of(meter.tensors[index])
    fp8, scale, bits = cast_by_own_amax(values, dtype, recipe, meter.scale[index])
    if records:
        meter.record(index, bits)
    return fp8, scale


def cast_by_own_amax(
    values: Tensor, dtype: torch.dtype, recipe: Recipe, known: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Casts by the scale that follows from the amax of ``values``, or by one that is known. Syncs host: no.

    Args:
        values: fp64, fp32, fp16 or bf16, any shape.
        known: fp32, shape (): the scale, or 0 for none.

    Returns:
        FP8 values, the scale that they carry (fp32, shape ()), and the amax bits of ``values`` (int32, shape ()).
    """
    if known is None:
        known = torch.zeros((), device=values.device)
    if _is_native(values):
        fp8, bits = _natively(values, known, dtype, recipe)
        return fp8, _scale(known, bits, dtype, recipe), bits
    bits = bits_of_amax(values)
    scale = _scale(known, bits, dtype, recipe)
    return cast(values, scale, dtype), scale, bits


def _scale(known: Tensor, bits: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    own = scale_of_amax(bits.view(torch.float32), torch.finfo(dtype).max, recipe, otherwise=1.0)
    return torch.where(known > 0, known, own)


def _is_native(values: Tensor) -> bool:
    is_known = type(values) in _PLAIN and values.dtype in ROW_DTYPES and values.device.type in ("cpu", "cuda")
    is_traced = torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(tracer) for tracer in _TRACERS)
    return is_known and not is_traced


def _natively(values: Tensor, scale: Tensor, dtype: torch.dtype, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """FP8 values, and their amax bits."""
    layout = _layout(values.numel(), dtype, recipe)
    messages, bits, _ = wire_kernels.quantize(values.reshape(1, -1), layout, scale.view(1))
    (segment,) = layout.segments
    fp8 = messages[0, segment.offset : segment.offset + segment.num_bytes].view(dtype)
    return fp8.view(values.shape), bits[0]


@lru_cache(maxsize=1024)
def _layout(numel: int, dtype: torch.dtype, recipe: Recipe) -> Layout:
    """Of a message that nobody else reads."""
    return replace(make_layout([Piece("", numel, is_fp8=True)], recipe), dtype=dtype)
