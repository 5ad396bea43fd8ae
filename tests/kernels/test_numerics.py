"""numerics.h, compiled for the host, against ml_dtypes and against exact fractions."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sweep_values import NATIVE, NUMPY, SMALL, all_codes, narrowed, one_nan, rounding_edges

import distscale.sweep
from distscale.sweep import INF_BITS
from distscale.sweep.plan import DTYPE_CODES

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))
FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST = Fraction(1, 2**149)
Bits = NDArray[np.uint32]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here (Debian, Ubuntu: apt-get install g++)")
    library = tmp_path_factory.mktemp("numerics") / "numerics.so"
    source = Path(__file__).with_name("numerics_shim.cpp")
    headers = f"-I{Path(distscale.sweep.__file__).parent}"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fsanitize=undefined"]
    stop = ["-fsanitize-undefined-trap-on-error"]  # needs no library of its own
    subprocess.run([compiler, *flags, *stop, headers, str(source), "-o", str(library)], check=True)
    functions = ctypes.CDLL(str(library))
    functions.largest.restype = ctypes.c_double
    return functions


def apply(function: Any, dtype: Any, *arguments: NDArray[Any] | int | float) -> NDArray[Any]:
    """Calls a function of the shim on arrays of one length, and returns what it writes, an array of ``dtype``."""
    result = np.empty(next(value.size for value in arguments if isinstance(value, np.ndarray)), dtype)
    function(*map(_passed, arguments), _passed(result), ctypes.c_int64(result.size))
    return result


def _passed(value: NDArray[Any] | int | float) -> Any:
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return value.ctypes.data_as(ctypes.c_void_p)
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int32(value)


def widen(shim: ctypes.CDLL, dtype: torch.dtype, codes: NDArray[Any]) -> Bits:
    return apply(shim.widen_all, np.uint32, DTYPE_CODES[dtype], codes.astype(np.uint32))


def narrow(shim: ctypes.CDLL, dtype: torch.dtype, bits: Bits) -> Bits:
    return apply(shim.narrow_all, np.uint32, DTYPE_CODES[dtype], bits)


def check_narrow(shim: ctypes.CDLL, dtype: torch.dtype, bits: Bits) -> None:
    with np.errstate(all="ignore"):
        wanted = narrowed(bits.view(np.float32), dtype)
    got = narrow(shim, dtype, bits)
    assert (got < 256**dtype.itemsize).all()
    codes = got.astype(wanted.dtype)
    bad = np.flatnonzero(one_nan(codes, dtype) != one_nan(wanted, dtype))
    assert not bad.size, [(hex(bits[i]), hex(codes[i]), hex(wanted[i])) for i in bad[:5]]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_pattern_is_widened_exactly(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    wanted = codes.view(NUMPY[dtype]).astype(np.float32)
    bits = widen(shim, dtype, codes)
    is_nan = np.isnan(wanted)
    assert is_nan.any() and ((bits[is_nan] & 0x7FFFFFFF) > INF_BITS).all()
    assert np.array_equal(bits[~is_nan], wanted[~is_nan].view(np.uint32))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_pattern_comes_back(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    back = narrow(shim, dtype, widen(shim, dtype, codes)).astype(codes.dtype)
    assert np.array_equal(one_nan(back, dtype), one_nan(codes, dtype))
    # Another format's values: those that are wider, and those of which only some exist.
    for other in SMALL:
        check_narrow(shim, dtype, widen(shim, other, all_codes(other)))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_rounding_at_every_value_and_midpoint(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    check_narrow(shim, dtype, rounding_edges(dtype))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@settings(max_examples=100 * EXAMPLES)
@given(first=st.integers(0, 2**32 - 1), step=st.integers(0, 2**20))
def test_rounding_of_any_fp32(shim: ctypes.CDLL, dtype: torch.dtype, first: int, step: int) -> None:
    check_narrow(shim, dtype, (first + step * np.arange(2000)).astype(np.uint32))


def test_what_is_too_large_saturates_in_fp8_only(shim: ctypes.CDLL) -> None:
    huge = np.array([1e30, -1e30, math.inf, -math.inf], np.float32).view(np.uint32)
    wanted = {
        torch.float16: [0x7C00, 0xFC00, 0x7C00, 0xFC00],
        torch.bfloat16: [0x714A, 0xF14A, 0x7F80, 0xFF80],
        torch.float8_e4m3fn: [0x7E, 0xFE, 0x7F, 0xFF],
        torch.float8_e5m2: [0x7B, 0xFB, 0x7C, 0xFC],
    }
    assert {dtype: narrow(shim, dtype, huge).tolist() for dtype in SMALL} == wanted


def test_fp32_is_left_alone(shim: ctypes.CDLL) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 10_000, dtype=np.uint32)
    assert np.array_equal(widen(shim, torch.float32, bits), bits)
    assert np.array_equal(narrow(shim, torch.float32, bits), bits)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_sizes(shim: ctypes.CDLL, dtype: torch.dtype) -> None:
    assert shim.largest(DTYPE_CODES[dtype]) == float(ml_dtypes.finfo(NUMPY[dtype]).max)
    assert shim.size(DTYPE_CODES[dtype]) == dtype.itemsize


def test_powers_for_squares(shim: ctypes.CDLL) -> None:
    exponents = np.arange(256, dtype=np.uint32) << 23
    amax = np.concatenate([exponents, exponents + 1, exponents + 0x7FFFFF])
    powers = apply(shim.powers_for_squares, np.float32, amax)
    assert (np.frexp(powers)[0] == 0.5).all()
    is_finite = amax < INF_BITS
    brought = amax[is_finite].view(np.float32).astype(np.float64) * powers[is_finite]
    assert (brought < 4).all()
    assert (brought[amax[is_finite] >= 1 << 23] >= 1).all()
    # A subnormal cannot be brought so far; its square is far from vanishing still.
    is_subnormal = (amax[is_finite] < 1 << 23) & (amax[is_finite] > 0)
    assert (brought[is_subnormal] >= 2.0**-22).all()


def test_powers_are_undone_exactly(shim: ctypes.CDLL) -> None:
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    sums = 1 + np.random.default_rng(1).random(powers.size)
    undone = apply(shim.undo_powers, np.float64, sums, powers)
    assert [Fraction(value) for value in undone] == [
        Fraction(value) / Fraction(float(power)) ** 2 for value, power in zip(sums, powers, strict=True)
    ]
    special = np.array([0.0, math.inf, math.nan])
    undone = apply(shim.undo_powers, np.float64, special, np.full(3, 2.0**127, np.float32))
    assert undone[0] == 0 and undone[1] == math.inf and math.isnan(undone[2])


def nearest_bits(value: Fraction) -> int:
    """Of fp32, ties to even, found by integer arithmetic; the value is not negative and not beyond fp32."""
    step = SMALLEST
    while value >= step * 2**24:
        step *= 2
    count, rest = divmod(value, step)
    count += rest * 2 > step or (rest * 2 == step and count % 2)
    # The codes of fp32 count the steps: 2^23 of them to every power of two.
    return int(count) + (int(step / SMALLEST).bit_length() - 1) * 2**23


finite_bits = st.integers(0, INF_BITS - 1)
factors = st.floats(2.0**-160, 2.0**160) | st.integers(-149, 127).map(lambda power: 2.0**power) | st.just(1.0)


@settings(max_examples=500 * EXAMPLES)
@given(amax=finite_bits, factor=factors, largest=st.sampled_from([448.0, 57344.0, 65504.0, FLOAT32_MAX]))
def test_unscaled_amax(shim: ctypes.CDLL, amax: int, factor: float, largest: float) -> None:
    product = float(np.uint32(amax).view(np.float32)) * factor
    (got,) = unscaled_amax(shim, [amax], factor, largest)
    assert got == (nearest_bits(Fraction(product)) if product <= largest else INF_BITS)


def unscaled_amax(shim: ctypes.CDLL, amax: list[int], factor: float, largest: float) -> list[int]:
    bits = np.array(amax, np.uint32)
    return apply(shim.unscaled_amaxes, np.uint32, bits, np.full(bits.size, factor), largest).tolist()


def test_an_amax_that_is_not_finite_stays_what_it_is(shim: ctypes.CDLL) -> None:
    bad = [INF_BITS, INF_BITS + 1, 0x7FC00000, 0x7FFFFFFF]
    for factor in (1.0, 0.5, 0.0, math.inf, math.nan):
        assert unscaled_amax(shim, bad, factor, 65504.0) == bad
    one = 0x3F800000
    assert unscaled_amax(shim, [0, one], math.nan, 65504.0) == [INF_BITS, INF_BITS]
    assert unscaled_amax(shim, [0, one], math.inf, 65504.0) == [INF_BITS, INF_BITS]
    assert unscaled_amax(shim, [0, one], 0.0, 65504.0) == [0, 0]
    assert unscaled_amax(shim, [one], 1.0, 0.5) == [INF_BITS]


limits = (
    st.floats(0, 2 * FLOAT32_MAX)
    | finite_bits.map(lambda bits: float(np.uint32(bits).view(np.float32)))
    | st.integers(-170, 130).map(lambda power: 2.0**power)
    | finite_bits.flatmap(lambda bits: st.sampled_from([0.0, math.inf]).map(lambda to: beside(bits, to)))
)


def beside(bits: int, to: float) -> float:
    """The double next to an fp32 value."""
    return float(np.nextafter(float(np.uint32(bits).view(np.float32)), to))


@settings(max_examples=500 * EXAMPLES)
@given(limit=limits, inclusive=st.booleans())
def test_largest_up_to(shim: ctypes.CDLL, limit: float, inclusive: bool) -> None:
    bits = largest_up_to(shim, limit, inclusive)
    value = float(np.uint32(bits).view(np.float32))
    assert bits < INF_BITS
    if bits:
        assert value < limit or (inclusive and value == limit)
    if bits + 1 < INF_BITS:
        above = float(np.uint32(bits + 1).view(np.float32))
        assert above > limit or (not inclusive and above == limit)


def largest_up_to(shim: ctypes.CDLL, limit: float, inclusive: bool) -> int:
    return int(apply(shim.largest_up_to_all, np.uint32, np.array([limit]), int(inclusive))[0])


@pytest.mark.parametrize("inclusive", [False, True])
def test_largest_up_to_a_limit_that_is_none(shim: ctypes.CDLL, inclusive: bool) -> None:
    limits = [0.0, -1.0, -math.inf, math.nan, 2.0**-160, math.inf, 1e300]
    got = [largest_up_to(shim, limit, inclusive) for limit in limits]
    assert got == [0, 0, 0, 0, 0, INF_BITS - 1, INF_BITS - 1]
