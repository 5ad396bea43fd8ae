"""The sweep in plain torch: the specification that the native code is tested against, and the fallback.

``|g|`` of a floating-point number, its bits read as a signed integer, is ordered like the number, and inf and NaN lie
above every finite value. So the integer maximum of the bits is at once the amax and the non-finite flag. Unlike a
floating-point maximum it cannot lose a NaN, and it does not depend on the flush-to-zero mode of the processor.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from distscale.sweep.chunks import chunks_of, scratch_for
from distscale.sweep.conclusion import conclude, constant, factors_of
from distscale.sweep.parts import INF_BITS, Count, Limits, Part, Request, Swept

__all__ = ["amax_bits", "scale_", "subnormals_kept", "sum_of_squares", "sweep", "takes"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_SAME_WIDTH_INT = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
_number_of_threads = threading.RLock()  # it is the process's, and one thread at a time may change it


def sweep(parts: Sequence[Part], request: Request) -> Swept:
    """Checks and measures parts of one device, any mix of fp64, fp32, fp16, bf16, e4m3fn and e5m2.

    Raises:
        TypeError: for another dtype.

    Collective: no. Syncs host: no.
    """
    with subnormals_kept():
        return _sweep(parts, request)


def _sweep(parts: Sequence[Part], request: Request) -> Swept:
    values = [part.values.resolve_neg() for part in parts]
    place = values[0].device
    factors = factors_of(parts, request)
    bits = amax_bits(values)
    squares = sum_of_squares(values) if request.want_norm else None
    counts = torch.zeros(len(parts), len(Count), dtype=torch.int64, device=place)
    # What lies in the host's memory is asked before a count that is likely to be zero; a device is not.
    worth_counting = (bits >= INF_BITS).tolist() if place.type == "cpu" else [True] * len(parts)
    for index, (part, factor) in enumerate(zip(parts, factors.unbind(), strict=True)):
        if worth_counting[index] or request.limits is not None:
            counts[index] = _count(values[index], factor, request.limits)
        if part.out is not None:
            if (part.out.device, part.out.shape) != (place, part.values.shape):
                raise ValueError(f"out is {_kind(part.out)} and must be like the values, {_kind(part.values)}")
            _unscale(part.values, factor.float(), part.out)
    return conclude(parts, bits, squares, counts, request)


def takes(parts: Sequence[Part]) -> bool:
    """Every tensor that can be swept at all."""
    return True


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
    scratch = scratch_for(shards, torch.float64)
    sums = scratch.new_zeros(len(shards))
    for total, shard in zip(sums.unbind(), shards, strict=True):
        for (chunk,) in chunks_of(shard):
            wide = scratch[: chunk.numel()]
            wide.view(chunk.shape).copy_(chunk)
            total += torch.dot(wide, wide)
    return sums


def scale_(shards: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
    """Multiplies every shard in place by ``factor``; the product is formed in fp32 (fp64 for fp64).

    Args:
        shards: as for :func:`amax_bits`, any mix of devices.
        factor: fp32, one element, on any device.
        found_inf: fp32, one element; the shards stay as they are if it is not 0.

    Collective: no. Syncs host: no, if the numbers are on the shards' device.
    """
    with subnormals_kept():
        if found_inf is not None:
            if found_inf.device.type == "cpu" and found_inf != 0:
                return
            factor = torch.where(found_inf.to(factor.device) == 0, factor, 1.0)
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for shard in shards:
            if shard.numel():
                by_kind[shard.device, shard.dtype].append(shard)
        for (device, dtype), tensors in by_kind.items():
            here = factor.to(device, non_blocking=True).view(())
            if dtype.itemsize > 1:
                torch._foreach_mul_(tensors, here)
            else:  # FP8 knows no arithmetic in torch
                for tensor in tensors:
                    _unscale(tensor, here, tensor)


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Ends this thread's flush-to-zero mode on the CPU for a while.

    The threads of torch's pool have the mode of the thread that made them, for good, so they get no work then.
    """
    if sys.float_info.min * 0.5 != 0:
        yield
        return
    with _number_of_threads:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)
        try:
            yield
        finally:
            torch.set_flush_denormal(True)
            torch.set_num_threads(num_threads)


def _kind(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} on {tensor.device}"


def _count(values: Tensor, factor: Tensor, limits: Limits | None) -> Tensor:
    """int64, shape (len(Count),)."""
    counts = torch.zeros(len(Count), dtype=torch.int64, device=values.device)
    integer = _SAME_WIDTH_INT[values.dtype]
    largest = torch.tensor([torch.finfo(values.dtype).max], dtype=values.dtype).view(integer).item()
    for (chunk,) in chunks_of(values):
        codes = chunk.view(integer) & torch.iinfo(integer).max
        counts[Count.NONFINITE] += (codes > largest).sum()
        if limits is None:
            continue
        magnitudes = codes.view(values.dtype).double()
        # Not inf, which is no value that can be lost.
        bounds = (constant(tuple(limits), torch.float64, values.device) / factor).clamp(max=sys.float_info.max)
        counts[Count.ZERO] += (magnitudes == 0).sum()
        counts[Count.LOST] += ((magnitudes != 0) & (magnitudes <= bounds[0])).sum()
        counts[Count.SUBNORMAL] += ((magnitudes > bounds[0]) & (magnitudes < bounds[1])).sum()
    return counts


def _unscale(values: Tensor, factor: Tensor, out: Tensor) -> None:
    """Writes ``values * factor``, formed in fp32 (fp64 for fp64), into ``out``, which may be ``values``.

    FP8 saturates at its largest finite value; inf and NaN stay what they are, or become NaN in a format without inf.
    """
    for chunk, target in chunks_of(values, out):
        product = (chunk if chunk.dtype is torch.float64 else chunk.float()) * factor
        if out.dtype.itemsize == 1:
            limit = torch.finfo(out.dtype).max
            saturated = product.clamp(-limit, limit)
            without_inf = product if out.dtype is torch.float8_e5m2 else float("nan")
            product = torch.where(product.isfinite(), saturated, without_inf)
        target.copy_(product)


def _native_amax_bits(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Largest absolute values as bits of the shards' own dtype: integers of the same width, shape (len(shards),)."""
    integer = _SAME_WIDTH_INT.get(dtype)
    if integer is None:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SAME_WIDTH_INT)
        raise TypeError(f"cannot check a gradient of dtype {dtype}; supported are {supported}")
    scratch = scratch_for(shards, integer)
    maxima = scratch.new_zeros(len(shards))
    for largest, shard in zip(maxima.unbind(), shards, strict=True):
        for (chunk,) in chunks_of(shard):
            magnitudes = scratch[: chunk.numel()].view(chunk.shape)
            torch.bitwise_and(chunk.view(integer), torch.iinfo(integer).max, out=magnitudes)
            torch.maximum(largest, magnitudes.max(), out=largest)
    return maxima


def _as_float32_bits(native: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float32:
        return native
    values = native.view(dtype)
    if dtype is torch.float64:
        values = torch.where(values.isfinite(), values.clamp(max=_FLOAT32_MAX), values)
    return values.float().view(torch.int32)
