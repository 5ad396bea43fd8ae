"""What every sweep must do: cases for any backend on any device.

    for name, case in CASES.items():
        check_sweep(backend, case(), device)

The oracle (sweep_oracle.py) knows formats from ml_dtypes and shares no code with what it judges. Every tensor lies
between canaries, at any distance from an aligned address, and nothing but what was asked for may change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st
from sweep_checks import CPU as CPU
from sweep_checks import check_patterns as check_patterns
from sweep_checks import check_scale as check_scale
from sweep_checks import check_sweep as check_sweep
from sweep_checks import flush_to_zero as flush_to_zero
from sweep_checks import strides_of
from sweep_oracle import Case as Case
from sweep_oracle import Shard as Shard
from sweep_values import KINDS, all_codes, codes_of, largest_of, rounding_edges, specials
from sweep_values import NATIVE as NATIVE
from sweep_values import NUMPY as NUMPY
from sweep_values import SMALL as SMALL
from sweep_values import random_codes as random_codes

from distscale.sweep import Limits


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
        for offset in range(64 // dtype.itemsize)
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


def _inf_and_nan() -> Case:
    """One at the begin, and the other in a later block or chunk, or in another part of the slot: NaN is the larger."""
    shards = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        bad = codes_of([math.inf, math.nan], dtype)
        for numel, (first, last) in itertools.product((5003, 70_001), (bad, bad[::-1])):
            codes = codes_of(np.ones(numel), dtype)
            codes[0], codes[-1] = first, last
            shards.append(Shard(codes, dtype, slot=len(shards)))
            shards += [Shard(codes[:5], dtype, slot=len(shards)), Shard(codes[-5:], dtype, slot=len(shards))]
    return Case(shards)


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
                codes[place] = codes_of(largest_of(dtype) / 2, dtype)[0]
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
            largest, *others = (largest_of(dtype), float(ml_dtypes.finfo(NUMPY[dtype]).smallest_subnormal), 1.5)
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
        codes = codes_of(np.clip(wanted, 0, largest_of(values)), values).astype(np.int64)
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
        if shard.out_layout is None or strides_of(210, shard.layout)[0] == strides_of(210, shard.out_layout)[0]
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
    "inf and nan": _inf_and_nan,
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
