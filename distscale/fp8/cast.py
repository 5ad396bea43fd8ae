"""The cast to FP8: with a scale, and without making anything finite that is not."""

from __future__ import annotations

import torch
from torch import Tensor

from distscale.fp8.meter import Meter
from distscale.fp8.recipe import Recipe
from distscale.fp8.scales import bits_of_amax, scale_of_amax

__all__ = ["cast", "quantize"]


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 of ``values * scale``, rounded to the nearest, and to the largest number of the format where beyond it.

    inf and NaN become NaN: E4M3 has no inf, and torch's own cast makes 448 of it. In operators that ``torch.compile``
    fuses. Syncs host: no.

    Args:
        values: fp64, fp32, fp16 or bf16, any shape.
        scale: fp32, shape ().
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        ``dtype``, shape of ``values``.
    """
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
    bits = bits_of_amax(values)
    if records:
        meter.record(index, bits)
    known = meter.scale[index]
    own = scale_of_amax(bits.view(torch.float32), torch.finfo(dtype).max, recipe, otherwise=1.0)
    scale = torch.where(known > 0, known, own)
    return cast(values, scale, dtype), scale
