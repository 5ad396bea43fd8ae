"""The counts of lost values are those of real casts."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distscale.profile import FORMATS, LossCounts, count_losses

REFERENCE = {
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
}
DTYPES = list(REFERENCE)


def counts_of_a_cast(values: np.ndarray, dtype: torch.dtype) -> LossCounts:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.abs(values.astype(REFERENCE[dtype]).astype(np.float64))
    nonzero = values != 0
    smallest_normal = float(ml_dtypes.finfo(REFERENCE[dtype]).smallest_normal)
    return LossCounts(
        int(nonzero.sum()), int((nonzero & (cast == 0)).sum()), int(((cast > 0) & (cast < smallest_normal)).sum())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_equal_those_of_a_cast_at_every_bound(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    bounds = [smallest / 2, smallest, 1.5 * smallest, info.smallest_normal - smallest / 2, info.smallest_normal]
    values = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0], np.float32)
    for bound in np.array(bounds, np.float32):
        near = [np.nextafter(bound, np.float32(0)), bound, np.nextafter(bound, np.float32(1))]
        values = np.concatenate([values, near, np.negative(near)])
    for value in values:
        one = np.array([value], np.float32)
        assert count_losses(torch.from_numpy(one), dtype) == counts_of_a_cast(one, dtype), repr(value)
    assert count_losses(torch.from_numpy(values), dtype) == counts_of_a_cast(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(bits=st.lists(st.integers(0, 2**32 - 1), max_size=30))
def test_counts_equal_those_of_a_cast_for_any_bits(dtype: torch.dtype, bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    assert count_losses(torch.from_numpy(values), dtype) == counts_of_a_cast(values, dtype)


def test_every_fp16_number_against_the_8_bit_formats() -> None:
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
        counts = count_losses(torch.from_numpy(values), dtype)
        assert counts == counts_of_a_cast(values.astype(np.float32), dtype)
        assert counts.lost > 0
        assert counts.subnormal > 0


def test_the_numbers_of_the_method() -> None:
    values = torch.tensor([1e-8, 6e-8, 6.1e-5, 6.2e-5, 0.0])
    assert count_losses(values, torch.float16) == LossCounts(nonzero=4, lost=1, subnormal=2)
    # Times 65536 all of them are normal numbers.
    assert count_losses(values * 65536, torch.float16) == LossCounts(nonzero=4, lost=0, subnormal=0)
    assert count_losses(values, torch.bfloat16) == LossCounts(nonzero=4, lost=0, subnormal=0)


@given(values=st.lists(st.floats(width=32, allow_nan=False), max_size=20), exponent=st.integers(-24, 24))
def test_inv_scale_undoes_a_loss_scale(values: list[float], exponent: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    scaled = tensor.double() * 2.0**exponent
    for dtype in FORMATS.values():
        assert count_losses(scaled, dtype, 2.0**-exponent) == count_losses(tensor, dtype)


def test_shape_and_layout_do_not_matter_and_gradients_are_not_followed() -> None:
    tensor = torch.full((4, 6), 1e-8, requires_grad=True)
    assert count_losses(tensor.t()[1:, ::2], torch.float16) == LossCounts(10, 10, 0)
    assert count_losses(torch.empty(0, 3), torch.float16) == LossCounts()
    assert count_losses(torch.tensor(1e-8), torch.float16) == LossCounts(1, 1, 0)


def test_counts_add_up_and_shares_are_of_the_nonzero_values() -> None:
    counts = sum([LossCounts(6, 1, 2), LossCounts(4, 1, 3)], LossCounts())
    assert counts == LossCounts(10, 2, 5)
    assert (counts.lost_share, counts.subnormal_share) == (0.2, 0.5)
    assert (LossCounts().lost_share, LossCounts().subnormal_share) == (0.0, 0.0)
