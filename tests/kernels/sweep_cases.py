"""What every sweep must do: cases and checks for any backend on any device, and an oracle that shares no code with it.

    for name, case in CASES.items():
        check_sweep(backend, case(), device)

The oracle knows formats from ml_dtypes and does its arithmetic in numpy's float64. Every tensor lies between canaries,
at any distance from an aligned address, and nothing but what was asked for may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from distscale.sweep import INF_BITS, Count, Limits, Part, reference
from distscale.sweep.choice import Backend
from distscale.sweep.parts import Request, Swept

__all__ = [
    "CASES",
    "CPU",
    "NATIVE",
    "NUMPY",
    "SMALL",
    "Case",
    "Shard",
    "all_codes",
    "cases",
    "check_patterns",
    "check_scale",
    "check_sweep",
    "flush_to_zero",
    "narrowing",
    "random_codes",
    "rounding_edges",
    "widening",
]

CPU = torch.device("cpu")
NUMPY: Mapping[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
NATIVE = [dtype for dtype in NUMPY if dtype is not torch.float64]
SMALL = [dtype for dtype in NATIVE if dtype is not torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NORM_TOLERANCE = 1e-6
_NAN_BITS = INF_BITS + 1
_CANARY = 0xA5
_ALIGNED = 64

Codes = NDArray[Any]
"""Bit patterns of a format: unsigned integers of its width."""


@dataclass(frozen=True)
class Shard:
    """A part to be, with its values as bit patterns, wherever they will lie."""

    codes: Codes
    dtype: torch.dtype
    slot: int = 0
    weight: float = 1.0
    is_scaled: bool = True
    group: int = 0
    scale_inv: float | None = None
    out: torch.dtype | None = None
    """Of the tensor that receives the unscaled values."""
    in_place: bool = False
    offset: int = 0
    """Distance of the values from a multiple of 64 bytes, in elements."""
    out_offset: int = 0
    layout: str = "flat"
    out_layout: str | None = None
    """None: as the values lie."""

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype if self.in_place else self.out


@dataclass(frozen=True)
class Case:
    """One sweep."""

    shards: Sequence[Shard]
    inv_scale: float = 1.0
    want_norm: bool = True
    limits: Limits | None = None

    @property
    def num_slots(self) -> int:
        return max(shard.slot for shard in self.shards) + 2

    @property
    def num_groups(self) -> int:
        return max(shard.group for shard in self.shards) + 1

    @property
    def numel(self) -> int:
        return sum(shard.codes.size for shard in self.shards)

    @cached_property
    def expected(self) -> Expected:
        """What the oracle finds, computed once for all backends."""
        return expected(self)


# ---------------------------------------------------------------- the oracle


@dataclass
class Expected:
    """What a sweep must find."""

    slots: NDArray[np.int64]
    sums: NDArray[np.float64]
    counts: NDArray[np.int64]
    outs: list[Codes | None] = field(default_factory=list)


def expected(case: Case) -> Expected:
    """To be called without the flush-to-zero mode, which numpy's arithmetic obeys."""
    wanted = Expected(
        np.zeros(case.num_slots, np.int64), np.zeros(case.num_groups), np.zeros((case.num_slots, len(Count)), np.int64)
    )
    with np.errstate(all="ignore"):
        for shard in case.shards:
            _expect(wanted, shard, case)
    return wanted


def _expect(wanted: Expected, shard: Shard, case: Case) -> None:
    values = _values(shard.codes, shard.dtype)
    factor = np.float64(case.inv_scale if shard.is_scaled else 1.0)
    if shard.scale_inv is not None:
        factor = factor * np.float64(np.float32(shard.scale_inv))
    magnitudes = np.abs(values)
    wanted.slots[shard.slot] = max(wanted.slots[shard.slot], _amax_bits(magnitudes, factor, shard))
    wanted.sums[shard.group] += shard.weight * np.sum(np.square(values)) * factor * factor
    counts = wanted.counts[shard.slot]
    counts[Count.NONFINITE] += np.count_nonzero(~np.isfinite(values))
    if case.limits is not None:
        zero_up_to, normal_from = (np.float64(limit) / factor for limit in case.limits)
        finite = magnitudes[np.isfinite(values)]
        counts[Count.ZERO] += np.count_nonzero(finite == 0)
        counts[Count.LOST] += np.count_nonzero((finite > 0) & (finite <= zero_up_to))
        counts[Count.SUBNORMAL] += np.count_nonzero((finite > zero_up_to) & (finite < normal_from))
    out = shard.out_dtype
    wanted.outs.append(out and _unscaled(shard.codes, shard.dtype, factor.astype(np.float32), out))


def _amax_bits(magnitudes: NDArray[np.float64], factor: np.float64, shard: Shard) -> int:
    if np.isnan(magnitudes).any():
        return _NAN_BITS
    amax = magnitudes.max(initial=0.0)
    if math.isinf(amax):
        return INF_BITS
    amax = np.float64(np.float32(min(amax, _largest(torch.float32))))
    if shard.out_dtype is not None:
        largest = _largest(shard.out_dtype)
    else:
        has_own = shard.scale_inv is None or shard.dtype is torch.float64
        largest = _largest(shard.dtype if has_own else torch.float32)
    unscaled = amax * factor
    if not unscaled <= largest:
        return INF_BITS
    return int(min(np.float32(unscaled), np.finfo(np.float32).max).view(np.int32))


def _largest(dtype: torch.dtype) -> float:
    return float(ml_dtypes.finfo(NUMPY[dtype]).max)


def _values(codes: Codes, dtype: torch.dtype) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of signaling NaN
        return codes.view(NUMPY[dtype]).astype(np.float64)


def _unscaled(codes: Codes, dtype: torch.dtype, factor: np.float32, out: torch.dtype) -> Codes:
    wide = np.dtype(np.float64 if dtype is torch.float64 else np.float32)
    return narrowed(codes.view(NUMPY[dtype]).astype(wide) * factor.astype(wide), out)


def narrowed(product: NDArray[Any], dtype: torch.dtype) -> Codes:
    """Nearest values of ``dtype``, as codes; FP8 saturates."""
    narrow = product.astype(NUMPY[dtype])
    if dtype in FP8:
        largest = NUMPY[dtype].type(ml_dtypes.finfo(NUMPY[dtype]).max)
        has_overflown = np.isfinite(product) & ~np.isfinite(narrow.astype(np.float32))
        narrow = np.where(has_overflown, np.where(np.signbit(product), -largest, largest), narrow)
    return narrow.view(f"u{narrow.itemsize}")


def _one_nan(codes: Codes, dtype: torch.dtype) -> Codes:
    """The same codes, but every NaN alike: which one it is says nothing."""
    is_nan = np.isnan(_values(codes, dtype))
    return np.where(is_nan, np.array(np.nan, NUMPY[dtype]).view(codes.dtype), codes)


# ---------------------------------------------------------------- tensors between canaries


class Placed:
    """A tensor with canaries before, after and in its gaps."""

    def __init__(self, codes: Codes, dtype: torch.dtype, device: torch.device, offset: int, layout: str) -> None:
        shape, strides = _strides(codes.size, layout)
        width = dtype.itemsize
        span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if codes.size else 0
        start = _ALIGNED + offset * width
        self.canvas = torch.full((start + span * width + _ALIGNED,), _CANARY, dtype=torch.uint8, device=device)
        flat = self.canvas[start : start + span * width].view(dtype)
        self.tensor = flat.as_strided(shape, strides)
        self.integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        self._codes = codes
        self._fill()
        self._before = self.canvas.clone()

    def codes(self) -> Codes:
        """What the tensor holds now, in its own order."""
        flat = self.tensor.view(self.integer).reshape(-1).cpu().numpy()
        return flat.view(self._codes.dtype)

    def is_intact(self) -> bool:
        """Whether nothing around the tensor has changed; puts back what was in it."""
        self._fill()
        return torch.equal(self.canvas, self._before)

    def _fill(self) -> None:
        if self._codes.size and 0 not in self.tensor.stride():
            source = torch.from_numpy(self._codes.view(f"i{self._codes.itemsize}").copy())
            self.tensor.view(self.integer).copy_(source.view(self.tensor.shape))
        elif self._codes.size:
            self.tensor.view(self.integer)[0] = int(self._codes.view(f"i{self._codes.itemsize}")[0])


def _strides(numel: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = next(rows for rows in (7, 5, 3, 2, 1) if numel % rows == 0)
    columns = numel // rows
    return {
        "flat": ((numel,), (1,)),
        "matrix": ((rows, columns), (columns, 1)),
        "permuted": ((rows, columns), (1, rows)),
        "permuted3": ((columns, 1, rows), (1, numel, columns)),
        "gapped": ((numel,), (3,)),
        "row gaps": ((rows, columns), (columns + 5, 1)),
        "expanded": ((numel,), (0,)),
    }[layout]


def _dense(layout: str) -> bool:
    return layout in ("flat", "matrix", "permuted", "permuted3")


@contextmanager
def flush_to_zero(mode: bool) -> Iterator[None]:
    """Sets the flush-to-zero mode of this thread, and ends it."""
    if not torch.set_flush_denormal(mode) and mode:
        pytest.skip("this processor has no flush-to-zero mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


# ---------------------------------------------------------------- checks


def check_sweep(backend: Backend, case: Case, device: torch.device = CPU, *, flush: bool = False) -> Swept:
    """Sweeps and compares all that there is with the oracle; returns what was found.

    What a backend does not take goes through the reference, as it does in :func:`distscale.sweep.sweep`. It must take
    every dense tensor of the five dtypes.
    """
    wanted = case.expected
    values = [Placed(shard.codes, shard.dtype, device, shard.offset, shard.layout) for shard in case.shards]
    outs = [_placed_out(shard, device) for shard in case.shards]
    parts = [_part(*both, device) for both in zip(case.shards, values, outs, strict=True)]
    if all(_must_take(shard) for shard in case.shards):
        assert backend.takes(parts)
    request = Request(
        case.num_slots,
        torch.tensor(case.inv_scale, dtype=torch.float64, device=device),
        case.want_norm,
        case.num_groups,
        case.limits,
    )
    with flush_to_zero(flush):
        swept = (backend if backend.takes(parts) else reference).sweep(parts, request)
    _compare(swept, wanted, case, device)
    for index, shard in enumerate(case.shards):
        where = f"part {index}: {_describe(shard)}"
        if (out_codes := wanted.outs[index]) is not None:
            target = values[index] if shard.in_place else outs[index]
            assert target is not None and shard.out_dtype is not None
            _same_codes(target.codes(), out_codes, shard.out_dtype, where, shard)
        if not shard.in_place:
            assert np.array_equal(values[index].codes(), shard.codes), f"values were written to, {where}"
        for placed in (values[index], outs[index]):
            assert placed is None or placed.is_intact(), f"memory around a tensor was written to, {where}"
    return swept


def check_patterns(
    backend: Backend, dtype: torch.dtype, device: torch.device = CPU, *, step: int = 1, numel: int = 64
) -> None:
    """Amax, square and counts of every ``step``-th pattern of a small format, alone in a part of ``numel`` of them."""
    codes = all_codes(dtype)[::step]
    magnitudes = np.abs(_values(codes, dtype))
    limits = Limits.of(torch.float8_e4m3fn)
    rows = torch.from_numpy(np.repeat(codes, numel).view(f"i{codes.itemsize}")).to(device).view(dtype).view(-1, numel)
    parts = [Part(row, index, 1.0, False, index) for index, row in enumerate(rows.unbind())]
    one = torch.ones((), dtype=torch.float64, device=device)
    assert backend.takes(parts)
    swept = backend.sweep(parts, Request(len(parts), one, True, len(parts), limits))
    slots = swept.slots.cpu().numpy()
    is_nan = np.isnan(magnitudes)
    assert (slots[is_nan] > INF_BITS).all()
    assert np.array_equal(slots[~is_nan], magnitudes[~is_nan].astype(np.float32).view(np.int32))
    assert swept.sums is not None
    with np.errstate(invalid="ignore"):
        squares = numel * np.square(magnitudes)
        np.testing.assert_allclose(swept.sums.cpu().numpy(), squares, NORM_TOLERANCE)
    is_subnormal = (magnitudes > limits.zero_up_to) & (magnitudes < limits.normal_from)
    is_lost = (magnitudes > 0) & (magnitudes <= limits.zero_up_to)
    wanted = np.stack([~np.isfinite(magnitudes), magnitudes == 0, is_lost, is_subnormal], axis=1)
    assert np.array_equal(swept.counts.cpu().numpy(), numel * wanted)


def check_scale(
    backend: Backend,
    shards: Sequence[Shard],
    factor: float,
    found_inf: float | None = None,
    device: torch.device = CPU,
    *,
    flush: bool = False,
) -> None:
    """Scales the values of ``shards`` in place and compares them, and the memory around them, with the oracle."""
    factor32 = np.float32(factor)
    with np.errstate(all="ignore"):
        wanted = [_unscaled(shard.codes, shard.dtype, factor32, shard.dtype) for shard in shards]
    values = [Placed(shard.codes, shard.dtype, device, shard.offset, shard.layout) for shard in shards]
    tensors = [placed.tensor for placed in values]
    found = None if found_inf is None else torch.tensor([found_inf], device=device)
    by = torch.tensor(factor, device=device)
    takes = backend.takes([Part(tensor, 0, 1.0, False) for tensor in tensors])
    with flush_to_zero(flush):
        (backend if takes else reference).scale_(tensors, by, found)
    for index, (shard, placed, codes) in enumerate(zip(shards, values, wanted, strict=True)):
        where = f"part {index}: {_describe(shard)}"
        if found_inf is not None and found_inf != 0:
            assert np.array_equal(placed.codes(), shard.codes), f"touched although found_inf is set, {where}"
        else:
            _same_codes(placed.codes(), codes, shard.dtype, where, shard)
        assert placed.is_intact(), f"memory around a tensor was written to, {where}"


def _placed_out(shard: Shard, device: torch.device) -> Placed | None:
    if shard.out is None or shard.in_place:
        return None
    codes = np.full(shard.codes.size, 0x5A, f"u{shard.out.itemsize}")
    return Placed(codes, shard.out, device, shard.out_offset, shard.out_layout or shard.layout)


def _part(shard: Shard, values: Placed, out: Placed | None, device: torch.device) -> Part:
    return Part(
        values.tensor,
        shard.slot,
        shard.weight,
        shard.is_scaled,
        shard.group,
        None if shard.scale_inv is None else torch.tensor([shard.scale_inv], device=device),
        values.tensor if shard.in_place else None if out is None else out.tensor,
    )


def _must_take(shard: Shard) -> bool:
    dtypes = {shard.dtype, shard.out_dtype} - {None}
    return dtypes <= set(NATIVE) and _dense(shard.layout) and shard.out_layout in (None, shard.layout)


def _compare(swept: Swept, wanted: Expected, case: Case, device: torch.device) -> None:
    assert swept.slots.dtype == torch.int32 and swept.slots.shape == (case.num_slots,)
    assert swept.counts.dtype == torch.int64 and swept.counts.shape == wanted.counts.shape
    assert swept.slots.device.type == swept.counts.device.type == device.type
    slots = swept.slots.cpu().numpy().astype(np.int64)
    slots = np.where(slots > INF_BITS, _NAN_BITS, slots)
    for slot in np.flatnonzero(slots != wanted.slots):
        pytest.fail(f"slot {slot}: amax bits {slots[slot]:#x}, not {wanted.slots[slot]:#x}; {_in_slot(case, slot)}")
    counts = swept.counts.cpu().numpy()
    for slot, column in np.argwhere(counts != wanted.counts):
        got, right = counts[slot, column], wanted.counts[slot, column]
        pytest.fail(f"slot {slot}: {Count(column).name} {got}, not {right}; {_in_slot(case, slot)}")
    assert (swept.sums is not None) == case.want_norm
    if swept.sums is not None:
        assert swept.sums.dtype == torch.float64 and swept.sums.shape == (case.num_groups,)
        sums = swept.sums.cpu().numpy()
        with np.errstate(invalid="ignore"):
            is_right = np.isclose(sums, wanted.sums, rtol=NORM_TOLERANCE, atol=0, equal_nan=True)
        for group in np.flatnonzero(~is_right):
            members = [_describe(shard) for shard in case.shards if shard.group == group][:3]
            pytest.fail(f"group {group}: sum of squares {sums[group]!r}, not {wanted.sums[group]!r}; {members}")


def _same_codes(got: Codes, wanted: Codes, dtype: torch.dtype, where: str, shard: Shard) -> None:
    got, wanted = _one_nan(got, dtype), _one_nan(wanted, dtype)
    bad = np.flatnonzero(got != wanted)
    if bad.size:
        first = bad[0]
        pytest.fail(
            f"{bad.size} of {got.size} values of {dtype} are wrong; element {first}, {shard.codes[first]:#x}, "
            f"became {got[first]:#x}, not {wanted[first]:#x}; {where}"
        )


def _in_slot(case: Case, slot: int) -> str:
    return f"inv_scale {case.inv_scale!r}; {[_describe(shard) for shard in case.shards if shard.slot == slot][:3]}"


def _describe(shard: Shard) -> str:
    codes = [hex(code) for code in shard.codes[:4]]
    return f"{replace(shard, codes=np.zeros(0))!r} with {shard.codes.size} values {codes}..."


# ---------------------------------------------------------------- values


def codes_of(values: Any, dtype: torch.dtype) -> Codes:
    """Codes of the values, rounded by numpy and ml_dtypes."""
    with np.errstate(over="ignore"):
        array = np.atleast_1d(np.asarray(values, np.float64).astype(NUMPY[dtype]))
    return array.view(f"u{array.itemsize}")


def all_codes(dtype: torch.dtype) -> Codes:
    """Every bit pattern of an 8 or 16 bit format."""
    return np.arange(256**dtype.itemsize, dtype=np.uint32).astype(f"u{dtype.itemsize}")


def rounding_edges(dtype: torch.dtype) -> Codes:
    """fp32 codes around which rounding to ``dtype`` changes.

    Every value, every midpoint between neighbours and what lies one fp32 step beside each of them; the midpoint above
    the largest finite value too; the edges of fp32 itself.
    """
    values = np.unique(np.abs(_values(all_codes(dtype), dtype)))
    values = values[np.isfinite(values)]
    beyond = 2 * values[-1] - values[-2]
    midpoints = (values + np.append(values[1:], beyond)) / 2
    exact = np.concatenate([values, midpoints, [beyond]])
    exact = exact[exact <= _largest(torch.float32)].astype(np.float32)
    around = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))]
    codes = np.unique(np.concatenate([np.concatenate(around).view(np.uint32), _fp32_edges()]))
    return np.concatenate([codes, codes | 0x80000000])


def _fp32_edges() -> Codes:
    powers = (np.arange(256, dtype=np.uint32) << 23)[:, None] + np.array([-1, 0, 1], np.int64)
    subnormals = 1 << np.arange(23)
    nans = [INF_BITS + 1, 0x7FC00000, 0x7FFFFFFF, 0x7FA00000, INF_BITS + 0x2000, INF_BITS + 0x10000]
    codes = np.concatenate([powers.ravel(), subnormals, subnormals * 2 - 1, nans])
    return codes[(codes >= 0) & (codes < 1 << 31)].astype(np.uint32)


def random_codes(rng: np.random.Generator, dtype: torch.dtype, numel: int, kind: str) -> Codes:
    """Values of a kind: those of gradients, tiny, huge, subnormal, any finite, any at all, or zeros of both signs."""
    width = dtype.itemsize
    anything = rng.integers(0, 256**width, numel, dtype=f"u{width}")
    if kind == "any":
        return anything
    if kind == "normal":
        return codes_of(rng.standard_normal(numel), dtype)
    if kind == "zeros":
        return codes_of(np.where(rng.random(numel) < 0.5, -0.0, 0.0), dtype)
    bounds = ml_dtypes.finfo(NUMPY[dtype])
    signs = rng.choice([-1.0, 1.0], numel)
    if kind == "subnormal":
        return codes_of(signs * rng.random(numel) * float(bounds.smallest_normal), dtype)
    if kind == "tiny":
        return codes_of(signs * (1 + 8 * rng.random(numel)) * float(bounds.smallest_subnormal), dtype)
    if kind == "huge":
        return codes_of(signs * (0.5 + rng.random(numel) / 2) * float(bounds.max), dtype)
    return np.where(np.isfinite(_values(anything, dtype)), anything, 0).astype(anything.dtype)


KINDS = ("normal", "finite", "any", "subnormal", "tiny", "huge", "zeros")


def specials(dtype: torch.dtype) -> dict[str, int]:
    """Codes that are handled wrong most easily."""
    numpy_dtype = NUMPY[dtype]
    bounds = ml_dtypes.finfo(numpy_dtype)
    values = {
        "-0": -0.0,
        "smallest subnormal": float(bounds.smallest_subnormal),
        "-largest subnormal": -float(bounds.smallest_normal) + float(bounds.smallest_subnormal),
        "-largest": -float(bounds.max),
        "nan": math.nan,
        "-nan": -math.nan,
    }
    if dtype is not torch.float8_e4m3fn:
        values |= {"inf": math.inf, "-inf": -math.inf}
    codes = {name: int(codes_of(value, dtype)[0]) for name, value in values.items()}
    if "inf" in codes:  # the first of the NaN, a signaling one
        codes["nan beside inf"] = codes["inf"] + 1
    return codes


# ---------------------------------------------------------------- cases


def _lengths() -> Case:
    rng = np.random.default_rng(1)
    lengths = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 257, 1000, 4095, 4096, 4097, 5003]
    shards = [Shard(random_codes(rng, dtype, numel, "normal"), dtype) for dtype in NATIVE for numel in lengths]
    return _own_slots(Case(shards, inv_scale=0.125))


def _long() -> Case:
    # The last value of each is the only one that matters.
    shards = []
    for index, dtype in enumerate(NATIVE):
        codes = random_codes(np.random.default_rng(index), dtype, 2**20 + 3, "normal")
        codes[-1] = codes_of(-100.0, dtype)[0]
        shards.append(Shard(codes, dtype))
    return _own_slots(Case(shards, inv_scale=2.0**-7))


def _offsets() -> Case:
    rng = np.random.default_rng(2)
    shards = [
        Shard(random_codes(rng, dtype, numel, "normal"), dtype, offset=offset)
        for dtype in NATIVE
        for offset in range(_ALIGNED // dtype.itemsize)
        for numel in (1, 17, 200)
    ]
    return _own_slots(Case(shards, inv_scale=4.0))


def _places() -> Case:
    """Each special value alone at each place of a short tensor."""
    numel = 67
    shards = []
    for dtype in NATIVE:
        for code in specials(dtype).values():
            for place in range(numel):
                codes = np.zeros(numel, f"u{dtype.itemsize}")
                codes[place] = code
                shards.append(Shard(codes, dtype, is_scaled=place % 2 == 0, offset=place % 5))
    return _own_slots(Case(shards, inv_scale=2.0, limits=Limits.of(torch.float16)))


def _shared() -> Case:
    """Several parts in a slot and in a group, of all dtypes, some scaled, some not, some with a scale of their own.

    Infinite sums have a group of their own.
    """
    rng = np.random.default_rng(3)
    shards = []
    for index, dtype in enumerate(NATIVE * 12):
        kind = ("normal", "finite", "any")[index % 3] if index > 20 else "normal"
        shards.append(
            Shard(
                random_codes(rng, dtype, int(rng.integers(0, 300)), kind),
                dtype,
                slot=int(rng.integers(0, 9)),
                weight=float(rng.choice([1.0, 0.5, 0.25, 1 / 3])),
                is_scaled=bool(rng.random() < 0.5),
                group=5 if kind == "any" else int(rng.integers(0, 5)),
                scale_inv=float(rng.random()) if dtype.itemsize == 1 or index % 10 == 0 else None,
            )
        )
    return Case(shards, inv_scale=2.0**-5, limits=Limits.of(torch.bfloat16))


def _mixture(kind: str, inv_scale: float) -> Case:
    rng = np.random.default_rng(4)
    shards = [Shard(random_codes(rng, dtype, 3001, kind), dtype) for dtype in NATIVE]
    return _own_slots(Case(shards, inv_scale))


def _huge_among_tiny() -> Case:
    """Squares of a block in which one value is so large that a power of two for it lets the others vanish."""
    shards = []
    for dtype in NATIVE:
        for numel in (64, 5003):
            for place in (0, numel // 2, numel - 1):
                codes = random_codes(np.random.default_rng(5), dtype, numel, "tiny")
                codes[place] = codes_of(_largest(dtype) / 2, dtype)[0]
                shards.append(Shard(codes, dtype, offset=1))
    return _own_slots(Case(shards))


def _swamped() -> Case:
    """Squares that are each too small to change an fp32 sum that holds 1, and count together."""
    shards = []
    for dtype, small in ((torch.float32, 2.0**-12.6), (torch.bfloat16, 2.0**-13), (torch.float16, 2.0**-13)):
        for numel in (1000, 4096, 65536):
            values = np.full(numel, small)
            values[0] = 1.0
            shards.append(Shard(codes_of(values, dtype), dtype))
    return _own_slots(Case(shards))


def _changing_ranges() -> Case:
    """Magnitudes that change from block to block by powers up to 2^250."""
    exponents = np.repeat(np.random.default_rng(6).integers(-140, 120, 50), 401)
    values = np.ldexp(np.random.default_rng(7).standard_normal(exponents.size), exponents)
    shards = [Shard(codes_of(values, dtype), dtype) for dtype in (torch.float32, torch.bfloat16)]
    shards += [Shard(codes_of(np.sort(np.abs(values)), dtype), dtype) for dtype in (torch.float32, torch.bfloat16)]
    return _own_slots(Case(shards, 2.0**-3))


def _scaled_by(inv_scale: float) -> Case:
    rng = np.random.default_rng(8)
    shards = [
        Shard(random_codes(rng, dtype, 333, kind), dtype, offset=3, in_place=kind == "finite", out=out)
        for dtype in NATIVE
        for kind, out in (("normal", None), ("finite", None), ("any", torch.float32), ("subnormal", torch.bfloat16))
    ]
    return _own_slots(Case(shards, inv_scale, limits=Limits.of(torch.float16)))


def _outs() -> Case:
    """Every dtype into every other and in place, at odd distances."""
    rng = np.random.default_rng(9)
    shards = []
    for dtype in NATIVE:
        for out in NATIVE:
            for numel, offset, out_offset in ((0, 0, 0), (1, 1, 2), (15, 3, 0), (67, 0, 1), (1001, 5, 7), (4099, 2, 2)):
                for kind in ("normal", "any"):
                    codes = random_codes(rng, dtype, numel, kind)
                    shards.append(Shard(codes, dtype, out=out, offset=offset, out_offset=out_offset))
        for numel in (1, 16, 67, 1001):
            shards.append(Shard(random_codes(rng, dtype, numel, "any"), dtype, in_place=True, offset=numel % 7))
    return _own_slots(Case(shards, inv_scale=1 / 3))


def _unscaled_copies() -> Case:
    """Copies into smaller formats without a factor: what becomes inf there must be seen."""
    shards = [
        Shard(codes_of([1.0, value], dtype), dtype, is_scaled=False, out=out)
        for dtype in NATIVE
        for out in NATIVE
        for value in (449.0, 57345.0, 65505.0, 7e4, -3.395e38)
    ]
    return _own_slots(Case(shards))


def _amax_at_the_edge() -> Case:
    """The largest values times factors that bring them just to the end of the format, and over it."""
    shards = []
    for dtype in NATIVE:
        for scale_inv in (1.0, 1 + 2.0**-23, 1 - 2.0**-24, 2.0, 0.5, 2.0**-100, 2.0**-126, 2.0**-149):
            largest, *others = (_largest(dtype), float(ml_dtypes.finfo(NUMPY[dtype]).smallest_subnormal), 1.5)
            for value in (largest, *others):
                for out in (None, dtype, torch.float16):
                    shards.append(Shard(codes_of([value], dtype), dtype, scale_inv=scale_inv, out=out))
    return _own_slots(Case(shards))


def _limits(dtype: torch.dtype, inv_scale: float) -> Case:
    """Values at the limits of a format, times the scale, and one step of their own dtype beside them."""
    limits = Limits.of(dtype)
    shards = []
    for values in NATIVE:
        wanted = np.array([limit / inv_scale for limit in (*limits, limits.zero_up_to * 2)])
        codes = codes_of(np.clip(wanted, 0, _largest(values)), values).astype(np.int64)
        around = np.unique(np.clip(np.concatenate([codes + step for step in (-2, -1, 0, 1, 2)] + [[0, 1]]), 0, None))
        magnitudes = around.astype(f"u{values.itemsize}")
        sign = 1 << (8 * values.itemsize - 1)
        both = np.concatenate([magnitudes, magnitudes | np.array(sign, magnitudes.dtype)])
        shards.append(Shard(np.tile(both, 9), values, offset=1))
        shards.append(Shard(random_codes(np.random.default_rng(10), values, 1003, "any"), values))
        shards.append(Shard(random_codes(np.random.default_rng(11), values, 1003, "normal"), values, scale_inv=0.7))
    return _own_slots(Case(shards, inv_scale, limits=limits))


def _shared_counts() -> Case:
    """A thousand parts that count into the same slots."""
    rng = np.random.default_rng(12)
    shards = [
        Shard(random_codes(rng, dtype, 50, "any"), dtype, slot=index % 3) for index, dtype in enumerate(NATIVE * 200)
    ]
    return Case(shards, 2.0**-10, limits=Limits.of(torch.float8_e5m2), want_norm=False)


def _strides_of_all_kinds(in_place: bool) -> Case:
    rng = np.random.default_rng(13)
    shards = []
    for dtype in NUMPY:
        for layout in ("matrix", "permuted", "permuted3", "gapped", "row gaps"):
            codes = random_codes(rng, dtype, 210, "finite")
            shards.append(Shard(codes, dtype, layout=layout, in_place=in_place))
            shards.append(Shard(codes, dtype, layout=layout, out=torch.float32))
            shards.append(Shard(codes, dtype, layout=layout, out=torch.float16, out_layout="matrix"))
            shards.append(Shard(codes, dtype, layout="permuted", out=torch.bfloat16, out_layout=layout))
    # _strides gives 210 the same shape, (7, 30), for all layouts of two axes; the others have one of their own.
    shards = [
        shard
        for shard in shards
        if shard.out_layout is None or _strides(210, shard.layout)[0] == _strides(210, shard.out_layout)[0]
    ]
    return _own_slots(Case(shards, 0.25, limits=Limits.of(torch.float16)))


def _dense_layouts() -> Case:
    rng = np.random.default_rng(14)
    shards = [
        Shard(random_codes(rng, dtype, 210, "finite"), dtype, layout=layout, offset=1, out=out, out_offset=2)
        for dtype in NATIVE
        for layout in ("matrix", "permuted", "permuted3")
        for out in (None, torch.float32, torch.float16)
    ]
    return _own_slots(Case(shards, 0.25))


def _expanded() -> Case:
    shards = [Shard(np.full(100, codes_of(-1.5, dtype)[0]), dtype, layout="expanded") for dtype in NUMPY]
    return _own_slots(Case(shards, 0.25))


def _wide() -> Case:
    """fp64 beside the native dtypes, with values beyond fp32."""
    rng = np.random.default_rng(15)
    shards = [
        Shard(random_codes(rng, torch.float64, 100, "normal"), torch.float64, group=0),
        Shard(codes_of([1e300, -1.0], torch.float64), torch.float64, group=1),
        Shard(codes_of([1e-300, math.nan], torch.float64), torch.float64, group=2),
        Shard(codes_of([0.1, 1e-60, 7e4], torch.float64), torch.float64, out=torch.float16),
        Shard(codes_of([0.1, 1e-60, 7e4], torch.float64), torch.float64, in_place=True),
        Shard(codes_of([0.1, 1e-40], torch.float32), torch.float32, out=torch.float64),
        Shard(codes_of([0.1, 3.0], torch.float16), torch.float16),
    ]
    return _own_slots(Case(shards, 2.0**-4, limits=Limits.of(torch.float16)))


def _own_slots(case: Case) -> Case:
    """The same with a slot and a group for each part, so that a difference has one cause."""
    shards = [replace(shard, slot=index, group=index) for index, shard in enumerate(case.shards)]
    return replace(case, shards=shards)


_MAKERS: Mapping[str, Callable[[], Case]] = {
    "lengths": _lengths,
    "long": _long,
    "offsets": _offsets,
    "places": _places,
    "shared slots and groups": _shared,
    "shared counts": _shared_counts,
    "tiny": lambda: _mixture("tiny", 1.0),
    "subnormal": lambda: _mixture("subnormal", 2.0**40),
    "huge": lambda: _mixture("huge", 2.0**-40),
    "any finite": lambda: _mixture("finite", 2.0**-10),
    "huge among tiny": _huge_among_tiny,
    "swamped": _swamped,
    "changing ranges": _changing_ranges,
    **{
        f"inv_scale 2^{power}": (lambda power=power: _scaled_by(2.0**power))
        for power in (-126, -100, -24, -1, 0, 1, 20, 100, 126)
    },
    "inv_scale 1/3": lambda: _scaled_by(1 / 3),
    "inv_scale beyond fp32": lambda: _scaled_by(2.0**140),
    "inv_scale inf": lambda: _scaled_by(math.inf),
    "inv_scale nan": lambda: _scaled_by(math.nan),
    "inv_scale 0": lambda: _scaled_by(0.0),
    "outs": _outs,
    "copies without a factor": _unscaled_copies,
    "amax at the edge": _amax_at_the_edge,
    **{
        f"limits of {str(dtype).removeprefix('torch.')}, inv_scale {inv_scale:.3g}": (
            lambda dtype=dtype, inv_scale=inv_scale: _limits(dtype, inv_scale)
        )
        for dtype in NATIVE
        for inv_scale in (1.0, 2.0**-16, 1 / 3, 2.0**30)
    },
    "strides": lambda: _strides_of_all_kinds(False),
    "strides in place": lambda: _strides_of_all_kinds(True),
    "dense layouts": _dense_layouts,
    "expanded": _expanded,
    "fp64": _wide,
}

CASES: Mapping[str, Callable[[], Case]] = {name: cache(make) for name, make in _MAKERS.items()}
"""All fixed cases but the conversions of every pattern, which :func:`widening` and :func:`narrowing` make."""


@cache
def widening(dtype: torch.dtype, out: torch.dtype, shifts: Sequence[int] = range(16)) -> Case:
    """Every pattern of a small format at every lane of a vector, into ``out``."""
    codes = all_codes(dtype)
    shards = [Shard(np.roll(codes, shift), dtype, is_scaled=False, out=out) for shift in shifts]
    return _own_slots(Case(shards))


@cache
def narrowing(dtype: torch.dtype, shifts: Sequence[int] = range(16)) -> Case:
    """Every fp32 value at which rounding to ``dtype`` changes, at every lane of a vector."""
    codes = rounding_edges(dtype)
    shards = [Shard(np.roll(codes, shift), torch.float32, is_scaled=False, out=dtype) for shift in shifts]
    return _own_slots(Case(shards))


@st.composite
def cases(draw: st.DrawFn, max_numel: int = 600) -> Case:
    """Random sweeps, of native dtypes for the most part."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shards = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(NATIVE * 3 + [torch.float64]))
        numel = draw(st.sampled_from([0, 1, 15, 16, 17]) | st.integers(0, max_numel))
        codes = random_codes(rng, dtype, numel, draw(st.sampled_from(KINDS)))
        if numel and draw(st.booleans()):
            codes[draw(st.integers(0, numel - 1))] = draw(st.sampled_from(list(specials(dtype).values())))
        out = draw(st.none() | st.sampled_from(NATIVE))
        in_place = draw(st.booleans()) and out is None
        shards.append(
            Shard(
                codes,
                dtype,
                slot=draw(st.integers(0, 3)),
                weight=draw(st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-10])),
                is_scaled=draw(st.booleans()),
                group=draw(st.integers(0, 2)),
                scale_inv=draw(st.none() | st.floats(2.0**-60, 2.0**60, width=32)),
                out=out,
                in_place=in_place,
                offset=draw(st.integers(0, 63 // dtype.itemsize)),
                out_offset=draw(st.integers(0, 63 // (out or dtype).itemsize)),
                layout=draw(st.sampled_from(["flat"] * 4 + ["matrix", "permuted", "permuted3", "gapped", "row gaps"])),
            )
        )
    power = draw(st.integers(-126, 126))
    inv_scale = draw(st.sampled_from([1.0, 2.0**power, 1.7 * 2.0**power]))
    limits = draw(st.none() | st.sampled_from([Limits.of(dtype) for dtype in NATIVE]))
    return Case(shards, inv_scale, draw(st.booleans()), limits)
