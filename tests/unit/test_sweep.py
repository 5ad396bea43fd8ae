"""The reference sweep against independent definitions: every bit pattern, any shape and stride, any flush mode."""

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distscale.sweep import INF_BITS, Part, loss_bits, scale_, sweep
from distscale.sweep.reference import amax_bits, sum_of_squares

FORMATS = [
    (torch.float16, np.dtype(np.float16), 16),
    (torch.bfloat16, np.dtype(ml_dtypes.bfloat16), 16),
    (torch.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn), 8),
    (torch.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2), 8),
]
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["subnormals", "flush-to-zero"])
def flush_mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not torch.set_flush_denormal(request.param) and request.param:
        pytest.skip("this processor has no flush-to-zero mode")
    yield request.param
    torch.set_flush_denormal(False)


def _float32_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@pytest.mark.parametrize(("dtype", "numpy_dtype", "width"), FORMATS, ids=lambda value: str(value))
def test_every_bit_pattern(dtype: torch.dtype, numpy_dtype: np.dtype, width: int, flush_mode: bool) -> None:
    patterns = np.arange(2**width, dtype=np.uint32).astype(f"uint{width}")
    expected = np.abs(patterns.view(numpy_dtype).astype(np.float32))
    shards = list(torch.from_numpy(patterns.view(f"int{width}")).view(dtype).split(1))
    bits = amax_bits(shards).numpy()
    is_nan = np.isnan(expected)
    assert (bits[~is_nan] == expected[~is_nan].view(np.int32)).all()
    assert (bits[is_nan] > INF_BITS).all()
    assert is_nan.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_wide_formats(dtype: torch.dtype, values: list[float]) -> None:
    (bits,) = amax_bits([torch.tensor(values, dtype=dtype)]).tolist()
    if any(map(math.isnan, values)):
        assert bits > INF_BITS
    else:
        assert bits == _float32_bits(max(map(abs, values)))


@pytest.mark.parametrize("value", [1e-40, 1.4e-45, 1.1754942e-38])
def test_fp32_subnormals_keep_their_value(value: float, flush_mode: bool) -> None:
    expected = _float32_bits(value)
    shard = torch.tensor([0, expected, 0], dtype=torch.int32).view(torch.float32)
    assert amax_bits([shard]).tolist() == [expected]


def test_fp32_subnormal_keeps_its_value_through_the_whole_sweep(flush_mode: bool) -> None:
    # C25
    expected = _float32_bits(1e-40)
    shard = torch.tensor([expected], dtype=torch.int32).view(torch.float32)
    for is_scaled in (False, True):
        part = Part(shard, slot=0, weight=1.0, is_scaled=is_scaled)
        slots, _, _ = sweep([part], 1, torch.tensor(1.0, dtype=torch.float64), False, CPU)
        assert slots.tolist() == [expected]


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0), (math.inf, math.nan), (math.nan, -math.inf)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nan_is_found_in_any_place(order: tuple[float, float], dtype: torch.dtype) -> None:
    assert amax_bits([torch.tensor(order, dtype=dtype)]).item() > INF_BITS


def test_fp64_beyond_fp32_is_finite() -> None:
    assert amax_bits([torch.tensor([1e300], dtype=torch.float64)]).tolist() == [INF_BITS - 1]
    assert amax_bits([torch.tensor([-math.inf], dtype=torch.float64)]).tolist() == [INF_BITS]


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 2**18 - 1, 2**18, 2**18 + 1, 2**20 + 3])
def test_lengths_and_the_last_element(numel: int) -> None:
    shard = torch.randn(numel)
    if numel:
        shard[-1] = -100.0
    assert amax_bits([shard]).tolist() == [_float32_bits(100.0) if numel else 0]
    assert sum_of_squares([shard]).item() == pytest.approx(shard.double().square().sum().item(), rel=1e-12)


def test_strides_do_not_matter() -> None:
    base = torch.randn(6, 5, 4, 3)
    shards = [
        base.transpose(0, 2),
        base.to(memory_format=torch.channels_last),
        base[::2, :, 1:3],
        base[0, 0, 0, 0],
        base[3:3],
    ]
    expected = [shard.abs().max().item() if shard.numel() else 0.0 for shard in shards]
    assert amax_bits(shards).view(torch.float32).tolist() == expected
    squares = [shard.double().square().sum().item() for shard in shards]
    assert sum_of_squares(shards).tolist() == pytest.approx(squares, rel=1e-12)


def test_squares_do_not_overflow_at_a_large_scale() -> None:
    # C30: gradients of 1e-3 at scale 2^80 are finite, their fp32 squares are not.
    shard = torch.full((1000,), 1e-3) * 2.0**80
    part = Part(shard, slot=0, weight=1.0, is_scaled=True)
    slots, sums, _ = sweep([part], 1, torch.tensor(2.0**-80, dtype=torch.float64), True, CPU)
    assert (slots < INF_BITS).all()
    assert sums is not None
    assert sums.sqrt().item() == pytest.approx(1e-3 * math.sqrt(1000), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "value", "scale", "is_bad"),
    [
        (torch.float32, 1e36, 2.0**-20, True),  # C10: finite, and inf once unscaled
        (torch.float32, 1e30, 2.0**-20, False),
        (torch.float16, 6e4, 2.0**-1, True),
        (torch.float16, 3e4, 2.0**-1, False),
        (torch.bfloat16, 6e4, 2.0**-1, False),
    ],
)
def test_overflow_by_unscaling_is_found(dtype: torch.dtype, value: float, scale: float, is_bad: bool) -> None:
    part = Part(torch.tensor([value], dtype=dtype), slot=1, weight=1.0, is_scaled=True)
    inv_scale = torch.tensor(1 / scale, dtype=torch.float64)
    slots, _, _ = sweep([part], 3, inv_scale, False, CPU)
    assert (slots >= INF_BITS).tolist() == [False, is_bad, False]
    unscaled = part.values.clone()
    scale_([unscaled], inv_scale.float())
    assert unscaled.isfinite().item() is not is_bad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("power", [-30, -1, 0, 3])
def test_the_product_is_formed_in_fp32(dtype: torch.dtype, power: int) -> None:
    # 2^-30 is zero in fp16: a product formed in the gradient's own dtype would be zero as well.
    values = torch.randn(100).to(dtype) * 1000
    expected = (values.double() * 2.0**power).to(dtype)
    scale_([values, torch.empty(0, dtype=dtype)], torch.tensor(2.0**power))
    assert torch.equal(values, expected)


def test_mixed_dtypes_weights_and_slots() -> None:
    parts = [
        Part(torch.tensor([3.0, -4.0]).half(), slot=2, weight=0.5, is_scaled=True),
        Part(torch.tensor([[8.0]]), slot=0, weight=1.0, is_scaled=True),
        Part(torch.tensor([1.0, 2.0], dtype=torch.float64), slot=3, weight=1.0, is_scaled=False),
        Part(torch.tensor([-16.0]).bfloat16(), slot=4, weight=0.25, is_scaled=True),
    ]
    slots, sums, _ = sweep(parts, 5, torch.tensor(0.5, dtype=torch.float64), True, CPU)
    assert slots.view(torch.float32).tolist() == [4.0, 0.0, 2.0, 2.0, 8.0]
    assert sums is not None
    assert sums.item() == (25 * 0.5 + 64 + 256 * 0.25) / 4 + 5


def test_no_part_at_all() -> None:
    slots, sums, _ = sweep([], 2, torch.tensor(1.0, dtype=torch.float64), True, CPU)
    assert slots.tolist() == [0, 0]
    assert sums is not None
    assert sums.tolist() == [0.0]


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(TypeError, match=r"dtype torch.int32; supported are float64, float32"):
        amax_bits([torch.ones(1, dtype=torch.int32)])


@pytest.mark.parametrize(
    "loss", [torch.tensor(math.nan), torch.tensor([1.0, math.inf]).half(), torch.tensor(complex(0, math.nan))]
)
def test_loss_that_is_not_finite(loss: torch.Tensor) -> None:
    assert loss_bits(loss).item() >= INF_BITS


def test_memory_does_not_grow_with_the_gradient() -> None:
    # C33. Counted where torch allocates: the largest single block that a sweep asks for.
    largest = []
    for numel in (2**20, 2**23):
        shard = torch.ones(numel, dtype=torch.float16)
        with torch.profiler.profile(profile_memory=True) as profile:
            amax_bits([shard])
            sum_of_squares([shard])
        largest.append(max(event.cpu_memory_usage for event in profile.events()))
    assert 0 < largest[1] <= largest[0] < 2**22
