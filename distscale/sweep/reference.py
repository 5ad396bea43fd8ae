"""The sweep in plain torch: the specification that the native kernels are tested against.

``|g|`` of a floating-point number, its bits read as a signed integer, is ordered like the number, and inf and NaN lie
above every finite value. So the integer maximum of the bits is at once the amax and the non-finite flag. Unlike a
floating-point maximum it cannot lose a NaN, and it does not depend on the flush-to-zero mode of the processor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["INF_BITS", "amax_bits", "scale_", "sum_of_squares"]

INF_BITS = 0x7F800000
"""Bits of a float32 inf; NaN lies above, every finite value below."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
_SAME_WIDTH_INT = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
# Temporaries are one chunk large, whatever the gradient's size. On the CPU a chunk fits the cache.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24


def amax_bits(shards: Sequence[Tensor]) -> Tensor:
    """Largest absolute value of each shard, as float32 bits.

    Args:
        shards: real floating-point tensors on one device, any mix of fp64, fp32, fp16, bf16, e4m3fn and e5m2, any
            shape, empty ones included.

    Returns:
        int32, shape (len(shards),): 0 for an empty shard, ``INF_BITS`` if the largest value is infinite, more if the
        shard holds a NaN. A finite fp64 value beyond float32 counts as the largest float32.

    Raises:
        TypeError: for a dtype that is not listed above.

    Collective: no. Syncs host: no.
    """
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, shard in enumerate(shards):
        by_dtype[shard.dtype].append(index)
    maxima: list[Tensor] = [torch.empty(0)] * len(shards)
    for dtype, indices in by_dtype.items():
        native = _native_amax_bits([shards[index] for index in indices], dtype)
        for index, bits in zip(indices, _as_float32_bits(native, dtype).unbind(), strict=True):
            maxima[index] = bits
    return torch.stack(maxima) if maxima else torch.empty(0, dtype=torch.int32)


def sum_of_squares(shards: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of each shard's values, formed in float64, which no fp32 square can overflow.

    Args:
        shards: as for :func:`amax_bits`.

    Returns:
        float64, shape (len(shards),).

    Collective: no. Syncs host: no.
    """
    if not shards:
        return torch.empty(0, dtype=torch.float64)
    scratch = _scratch(shards, torch.float64)
    sums = scratch.new_zeros(len(shards))
    for total, shard in zip(sums.unbind(), shards, strict=True):
        for chunk in _chunks(shard):
            wide = scratch[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
    return sums


def scale_(shards: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies every shard in place by ``factor`` (fp32, shape (), on any device); the product is formed in fp32.

    Collective: no. Syncs host: no, if ``factor`` is on the shards' device.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for shard in shards:
        if shard.numel():
            by_kind[shard.device, shard.dtype].append(shard)
    for (device, dtype), tensors in by_kind.items():
        here = factor.to(device, non_blocking=True)
        if dtype.itemsize > 1:
            torch._foreach_mul_(tensors, here)
        else:  # FP8 knows no arithmetic in torch
            for tensor in tensors:
                tensor.copy_(tensor.float() * here)


def _native_amax_bits(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Largest absolute values as bits of the shards' own dtype: integers of the same width, shape (len(shards),)."""
    integer = _SAME_WIDTH_INT.get(dtype)
    if integer is None:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SAME_WIDTH_INT)
        raise TypeError(f"cannot check a gradient of dtype {dtype}; supported are {supported}")
    scratch = _scratch(shards, integer)
    maxima = scratch.new_zeros(len(shards))
    for largest, shard in zip(maxima.unbind(), shards, strict=True):
        for chunk in _chunks(shard):
            magnitudes = scratch[: chunk.numel()]
            torch.bitwise_and(chunk.view(integer), torch.iinfo(integer).max, out=magnitudes)
            torch.maximum(largest, magnitudes.max(), out=largest)
    return maxima


def _as_float32_bits(native: Tensor, dtype: torch.dtype) -> Tensor:
    values = native.view(dtype)
    if dtype is torch.float64:
        values = torch.where(values.isfinite(), values.clamp(max=_FLOAT32_MAX), values)
    return values.float().view(torch.int32)


def _scratch(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One chunk to work in, for all shards in turn; fresh ones would leave a gradient's size of pieces in the heap."""
    device = shards[0].device
    numel = max(shard.numel() for shard in shards)
    return torch.empty(min(numel, _chunk_size(device)), dtype=dtype, device=device)


def _chunk_size(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def _chunks(shard: Tensor) -> Sequence[Tensor]:
    """The shard's values in storage order, in pieces; none if it is empty."""
    flat = _flat(shard)
    return torch.split(flat, _chunk_size(shard.device)) if flat.numel() else ()


def _flat(shard: Tensor) -> Tensor:
    """All values in storage order, without a copy where the shard is dense in memory, whatever its strides."""
    if not shard.is_contiguous():
        strides = shard.stride()
        shard = shard.permute(sorted(range(shard.ndim), key=lambda dim: -strides[dim]))
    return shard.detach().reshape(-1)
