"""The sweep by examples, and what chooses the code that does it; tests/kernels has the volume."""

import math
from collections.abc import Callable, Iterator
from typing import NoReturn

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distscale import ConfigError
from distscale.sweep import INF_BITS, Count, Limits, Part, choice, cpu, loss_bits, reference, scale_, sweep
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


def test_dtypes_that_native_code_does_not_know_beside_those_that_it_does() -> None:
    """All at once: fp64, and complex numbers as pairs of reals, go through the reference; strides with gaps too."""
    pairs = torch.view_as_real(torch.tensor([complex(3, -4)]))
    gaps = torch.tensor([1.0, math.nan, 2.0, math.inf])[::2]
    small = torch.tensor([2.0**-130, 0.0], dtype=torch.float64)
    parts = [
        Part(torch.tensor([1e300, math.nan], dtype=torch.float64), slot=0, weight=1.0, is_scaled=True),
        Part(pairs, slot=1, weight=0.5, is_scaled=True, group=1),
        Part(torch.tensor([16.0, -math.inf]).half(), slot=2, weight=1.0, is_scaled=True),
        Part(gaps, slot=1, weight=1.0, is_scaled=False, group=1, out=gaps),
        Part(torch.tensor([-8.0]).bfloat16(), slot=1, weight=1.0, is_scaled=True, group=1),
        Part(small, slot=3, weight=1.0, is_scaled=True, out=small),
    ]
    inv_scale = torch.tensor(0.5, dtype=torch.float64)
    found = sweep(parts, 5, inv_scale, True, CPU, num_groups=2, limits=Limits.of(torch.float16))
    assert (found.slots >= INF_BITS).tolist() == [True, False, True, False, False]
    assert found.slots[1:2].view(torch.float32).item() == 4.0
    assert found.sums is not None and found.sums[0].isnan()
    assert found.sums[1].item() == 25 * 0.5 / 4 + 5 + 16
    assert found.counts.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert small.tolist() == [2.0**-131, 0.0]
    assert found.counts.shape[1] == len(Count)


BAD = [Part(torch.tensor([2.0, math.inf]), slot=0, weight=1.0, is_scaled=True)]
ONE = torch.tensor(1.0, dtype=torch.float64)


@pytest.fixture
def choose_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Sets DISTSCALE_SWEEP; what was chosen is forgotten before and after."""

    def set_to(setting: str | None) -> None:
        monkeypatch.setenv("DISTSCALE_SWEEP", setting or "")
        if setting is None:
            monkeypatch.delenv("DISTSCALE_SWEEP")

    choice._choose.cache_clear()
    yield set_to
    choice._choose.cache_clear()


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(device: torch.device) -> NoReturn:
        raise choice.Unavailable("it is not there; get it")

    monkeypatch.setattr(choice, "_load", load)


@pytest.mark.parametrize("setting", ["native", "", None])
def test_native_where_there_is_a_library(choose_by: Callable[[str | None], None], setting: str | None) -> None:
    choose_by(setting)
    assert choice.choose(CPU) == (cpu, "native", cpu.load().description)


def test_reference_does_not_ask_for_the_library(choose_by: Callable[[str | None], None], no_library: None) -> None:
    choose_by("reference")
    assert choice.choose(CPU) == (reference, "reference", "DISTSCALE_SWEEP=reference is set")
    assert sweep(BAD, 1, ONE, True, CPU).slots.item() == INF_BITS


def test_setting_that_is_none(choose_by: Callable[[str | None], None]) -> None:
    choose_by("Native")
    with pytest.raises(ConfigError, match=r"DISTSCALE_SWEEP='Native'.* set it to native or reference"):
        sweep(BAD, 1, ONE, True, CPU)


def test_devices_without_native_code(choose_by: Callable[[str | None], None]) -> None:
    choose_by("native")
    chosen = choice.choose(torch.device("meta"))
    assert chosen.backend is reference
    assert "meta" in chosen.why


def test_without_the_library_one_warning_says_so(choose_by: Callable[[str | None], None], no_library: None) -> None:
    choose_by(None)
    with pytest.warns(UserWarning, match="cpu are swept by the slower reference: it is not there; get it") as warnings:
        slots = [sweep(BAD, 1, ONE, True, CPU).slots.item() for _ in range(3)]
    scale_([torch.ones(1)], torch.tensor(2.0))  # another warning would be an error here
    assert slots == [INF_BITS] * 3
    assert len(warnings) == 1
    assert choice.choose(CPU) == (reference, "reference", "it is not there; get it")


def test_without_the_library_native_is_an_error(choose_by: Callable[[str | None], None], no_library: None) -> None:
    choose_by("native")
    with pytest.raises(ConfigError, match="DISTSCALE_SWEEP=native is set, but it is not there; get it"):
        sweep(BAD, 1, ONE, True, CPU)
