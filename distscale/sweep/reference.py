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
from functools import lru_cache

import torch
from torch import Tensor

from distscale.sweep.parts import INF_BITS, Count, Limits, Part, Request, Swept

__all__ = ["amax_bits", "conclude", "constant", "scale_", "subnormals_kept", "sum_of_squares", "sweep", "takes"]

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
    factors = _factors(parts, request)
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


def conclude(parts: Sequence[Part], bits: Tensor, squares: Tensor | None, counts: Tensor, request: Request) -> Swept:
    """Ends a sweep: from what was found in the values, part by part, to what is true of the unscaled values.

    Args:
        parts: on one device.
        bits: int32, shape (len(parts),): amax bits of the values as they are.
        squares: float64, shape (len(parts),): sums of their squares; None if no norm is wanted.
        counts: int64, shape (len(parts), len(Count)).

    Collective: no. Syncs host: no.
    """
    place = bits.device
    factors = _factors(parts, request)
    largest = constant(tuple(_largest(part) for part in parts), torch.float64, place)
    slot_of = constant(tuple(part.slot for part in parts), torch.int64, place)
    slots = torch.zeros(request.num_slots, dtype=torch.int32, device=place)
    slots.scatter_reduce_(0, slot_of, _unscaled_amax_bits(bits, factors, largest), "amax")
    sums = None
    if squares is not None:
        weights = constant(tuple(part.weight for part in parts), torch.float64, place)
        weighted = squares * weights * factors * factors
        if request.num_groups == 1:
            sums = weighted.sum(dim=0, keepdim=True)  # in the same order every time, on a device too
        else:
            group_of = constant(tuple(part.group for part in parts), torch.int64, place)
            sums = torch.zeros(request.num_groups, dtype=torch.float64, device=place)
            sums.scatter_add_(0, group_of, weighted)
    counts_of_slots = torch.zeros(request.num_slots, len(Count), dtype=torch.int64, device=place)
    return Swept(slots, sums, counts_of_slots.index_add_(0, slot_of, counts))


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
    scratch = _scratch(shards, torch.float64)
    sums = scratch.new_zeros(len(shards))
    for total, shard in zip(sums.unbind(), shards, strict=True):
        for (chunk,) in _chunks(shard):
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


def _unscaled_amax_bits(bits: Tensor, factors: Tensor, largest: Tensor) -> Tensor:
    """Bits of ``amax * factor``, rounded to nearest, or of inf if that is larger than ``largest``."""
    unscaled = bits.view(torch.float32).double() * factors
    unscaled = torch.where(unscaled <= largest, unscaled.clamp(max=_FLOAT32_MAX), torch.inf)
    return torch.where(bits >= INF_BITS, bits, unscaled.float().view(torch.int32))


def _kind(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} on {tensor.device}"


def _factors(parts: Sequence[Part], request: Request) -> Tensor:
    """What unscales the values: float64, shape (len(parts),)."""
    place = parts[0].values.device
    inv_scale = request.inv_scale.to(place, non_blocking=True)
    is_scaled = constant(tuple(part.is_scaled for part in parts), torch.bool, place)
    factors = torch.where(is_scaled, inv_scale, 1.0)
    if any(part.scale_inv is not None for part in parts):
        ones = torch.ones((), device=place)
        scale_invs = [ones if part.scale_inv is None else part.scale_inv.detach().view(()) for part in parts]
        factors = factors * torch.stack(scale_invs).double()
    return factors


def _largest(part: Part) -> float:
    """The largest magnitude that an unscaled value may have; amax is known up to float32's range only."""
    dtype = part.values.dtype if part.out is None else part.out.dtype
    if dtype is torch.float64:
        return float("inf")
    if part.out is None and part.scale_inv is not None:
        return _FLOAT32_MAX
    return min(torch.finfo(dtype).max, _FLOAT32_MAX)


def _count(values: Tensor, factor: Tensor, limits: Limits | None) -> Tensor:
    """int64, shape (len(Count),)."""
    counts = torch.zeros(len(Count), dtype=torch.int64, device=values.device)
    integer = _SAME_WIDTH_INT[values.dtype]
    largest = torch.tensor([torch.finfo(values.dtype).max], dtype=values.dtype).view(integer).item()
    for (chunk,) in _chunks(values):
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
    for chunk, target in _chunks(values, out):
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
    scratch = _scratch(shards, integer)
    maxima = scratch.new_zeros(len(shards))
    for largest, shard in zip(maxima.unbind(), shards, strict=True):
        for (chunk,) in _chunks(shard):
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


def _scratch(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One chunk to work in, for all shards in turn; fresh ones would leave a gradient's size of pieces in the heap."""
    device = shards[0].device
    numel = max(shard.numel() for shard in shards)
    return torch.empty(min(numel, _chunk_size(device)), dtype=dtype, device=device)


def _chunk_size(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape in views of at most a chunk; in the storage order of the first, flat if strides allow it."""
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    tensors = tuple(tensor.detach().permute(order) for tensor in tensors)
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    numel, size = tensors[0].numel(), _chunk_size(tensors[0].device)
    if numel <= size:
        if numel:
            yield tensors
    elif (row := numel // len(tensors[0])) <= size:
        yield from zip(*(torch.split(tensor, size // row) for tensor in tensors), strict=True)
    else:
        for rows in zip(*(tensor.unbind() for tensor in tensors), strict=True):
            yield from _chunks(*rows)


@lru_cache(maxsize=64)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor that is the same at every step, so that it is copied to the device once."""
    return torch.tensor(values, dtype=dtype, device=device)
