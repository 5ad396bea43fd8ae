"""Values of the formats as bit patterns, by ml_dtypes and numpy, and the ones that are handled wrong most easily."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from distscale.sweep import INF_BITS

__all__ = [
    "FP8",
    "KINDS",
    "NATIVE",
    "NUMPY",
    "SMALL",
    "Codes",
    "all_codes",
    "codes_of",
    "largest_of",
    "narrowed",
    "one_nan",
    "random_codes",
    "rounding_edges",
    "specials",
    "values_of",
]

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

Codes = NDArray[Any]
"""Bit patterns of a format: unsigned integers of its width."""


def values_of(codes: Codes, dtype: torch.dtype) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of signaling NaN
        return codes.view(NUMPY[dtype]).astype(np.float64)


def largest_of(dtype: torch.dtype) -> float:
    return float(ml_dtypes.finfo(NUMPY[dtype]).max)


def narrowed(product: NDArray[Any], dtype: torch.dtype) -> Codes:
    """Nearest values of ``dtype``, as codes; FP8 saturates."""
    narrow = product.astype(NUMPY[dtype])
    if dtype in FP8:
        largest = NUMPY[dtype].type(ml_dtypes.finfo(NUMPY[dtype]).max)
        has_overflown = np.isfinite(product) & ~np.isfinite(narrow.astype(np.float32))
        narrow = np.where(has_overflown, np.where(np.signbit(product), -largest, largest), narrow)
    return narrow.view(f"u{narrow.itemsize}")


def one_nan(codes: Codes, dtype: torch.dtype) -> Codes:
    """The same codes, but every NaN alike: which one it is says nothing."""
    is_nan = np.isnan(values_of(codes, dtype))
    return np.where(is_nan, np.array(np.nan, NUMPY[dtype]).view(codes.dtype), codes)


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
    values = np.unique(np.abs(values_of(all_codes(dtype), dtype)))
    values = values[np.isfinite(values)]
    beyond = 2 * values[-1] - values[-2]
    midpoints = (values + np.append(values[1:], beyond)) / 2
    exact = np.concatenate([values, midpoints, [beyond]])
    exact = exact[exact <= largest_of(torch.float32)].astype(np.float32)
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
    return np.where(np.isfinite(values_of(anything, dtype)), anything, 0).astype(anything.dtype)


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
