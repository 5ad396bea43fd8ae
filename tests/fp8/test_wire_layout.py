"""Messages: where what lies in them, what they take, and that what comes out is what went in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distscale.fp8 import CurrentScaling, DelayedScaling
from distscale.fp8.rounding import random_bits, round_stochastically
from distscale.fp8.scales import bits_of_amax, scale_of_amax
from distscale.fp8.wire import Layout, Piece, make_layout
from distscale.fp8.wire_reference import dequantize, quantize, sum_rows

E4M3 = DelayedScaling("E4M3")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
INF_BITS = 0x7F800000

pieces = st.lists(st.builds(Piece, st.uuids().map(str), st.integers(0, 400), st.booleans()), max_size=6)


def agreed(rows: Tensor, layout: Layout, factor: float = 1.0) -> Tensor:
    """Scales that fit ``rows`` times ``factor``."""
    amax = [bits_of_amax(rows[:, part.start : part.stop]).view(torch.float32) * factor for part in layout.in_fp8]
    scales = [scale_of_amax(value, LARGEST[layout.dtype], layout.recipe, 1.0) for value in amax]
    return torch.stack(scales) if scales else torch.empty(0)


# ---------------------------------------------------------------- layout


@given(pieces, st.booleans())
def test_nothing_overlaps_and_all_is_aligned(pieces: list[Piece], is_blockwise: bool) -> None:
    layout = make_layout(pieces, E4M3, is_blockwise)
    end, start = 4, 0
    for segment in layout.in_fp8:
        assert segment.scaling == end
        assert is_blockwise or segment.scaling % 4 == 0
        end += segment.num_blocks if is_blockwise else 4
    for piece, segment in zip(pieces, layout.segments, strict=True):
        assert segment.piece == piece and segment.start == start
        assert end <= segment.offset < end + 16 and segment.offset % 16 == 0
        end, start = segment.offset + piece.numel * (1 if piece.is_fp8 else 2), segment.stop
    assert layout.row_numel == start
    assert layout.row_bytes % 16 == 0 and end <= layout.row_bytes < end + 16


def test_identity_is_of_all_that_must_be_equal() -> None:
    base = [Piece("a", 64, True), Piece("b", 64, True)]
    others = [
        make_layout(base, E4M3),
        make_layout(base[::-1], E4M3),
        make_layout([Piece("a", 64, True), Piece("c", 64, True)], E4M3),
        make_layout([Piece("a", 64, True), Piece("b", 64, False)], E4M3),
        make_layout([Piece("a", 63, True), Piece("b", 65, True)], E4M3),
        make_layout(base, E4M3, is_blockwise=True),
        make_layout(base, DelayedScaling("E5M2")),
        make_layout(base, CurrentScaling("E4M3")),
    ]
    assert len({layout.identity for layout in others}) == len(others)
    assert make_layout(base, E4M3).identity == others[0].identity


@pytest.mark.parametrize("is_blockwise", [False, True])
@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_bytes_of_a_transformer(world_size: int, is_blockwise: bool) -> None:
    """Width 512, a vocabulary of bytes. Norms, biases and the embedding go in bf16."""
    shapes = {
        "embedding": [(256, 512)],
        "norms": [(512,)] * 4,
        "weights": [(1536, 512), (512, 512), (2048, 512), (512, 2048)],
        "biases": [(1536,), (512,), (2048,), (512,)],
    }
    layers = [
        Piece(f"{name}{index}", -(-shape[0] // world_size) * math.prod(shape[1:]), name == "weights")
        for name, all_shapes in shapes.items()
        for index, shape in enumerate(all_shapes)
        if name != "embedding"
    ]
    block = make_layout(layers, E4M3, is_blockwise)
    root = make_layout([Piece("embedding", 256 // world_size * 512, False)], E4M3, is_blockwise)
    num_bytes, numel = 8 * block.row_bytes + root.row_bytes, 8 * block.row_numel + root.row_numel
    assert num_bytes <= 0.26 * 4 * numel
    assert num_bytes <= 0.51 * 2 * numel


# ---------------------------------------------------------------- there and back


@given(pieces, st.booleans(), st.sampled_from(["E4M3", "E5M2"]), st.integers(0, 100), st.booleans())
def test_values_come_back(pieces: list[Piece], is_blockwise: bool, fp8_format: str, seed: int, knows: bool) -> None:
    layout = make_layout(pieces, DelayedScaling(fp8_format), is_blockwise)  # type: ignore[arg-type]
    rows = torch.randn(3, layout.row_numel, generator=torch.Generator().manual_seed(seed))
    scale = agreed(rows, layout) if knows else torch.zeros(len(layout.in_fp8))
    messages, bits, num_saturated = quantize(rows, layout, scale)
    assert messages.shape == (3, layout.row_bytes)
    assert not num_saturated.any()
    back = dequantize(messages, layout)
    step = 2.0**-4 if layout.dtype == torch.float8_e4m3fn else 2.0**-3
    for segment in layout.segments:
        mine, theirs = rows[:, segment.start : segment.stop], back[:, segment.start : segment.stop]
        if not segment.piece.is_fp8:
            assert torch.equal(theirs, mine.bfloat16().float())
        elif mine.numel():
            assert ((theirs - mine).abs() <= step * mine.abs() + 1e-4).all()
    assert torch.equal(bits, torch.tensor([bits_of_amax(rows[:, p.start : p.stop]) for p in layout.in_fp8]).int())
    torch.testing.assert_close(sum_rows(messages, layout, 0.5), back.sum(0) * 0.5, rtol=1e-5, atol=1e-6)


def test_senders_may_scale_differently() -> None:
    layout = make_layout([Piece("a", 512, True)], E4M3)
    torch.manual_seed(0)
    rows = torch.randn(4, 512) * torch.tensor([1e-16, 1e-8, 1.0, 1e16])[:, None]
    messages = torch.cat([quantize(row[None], layout, torch.zeros(1)).messages for row in rows])
    back = dequantize(messages, layout)
    assert ((back - rows).norm(dim=1) / rows.norm(dim=1) < 0.03).all()


def test_all_fp8_numbers_come_back_in_blocks_of_any_size() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    for exponent in (-120, -40, 0, 40, 110):
        for numel in (1, 127, 128, 129, 254):
            layout = make_layout([Piece("a", numel, True)], E4M3, is_blockwise=True)
            rows = numbers[:numel].roll(1)[None] * 2.0**exponent
            rows[0, ::128] = 448.0 * 2.0**exponent
            assert torch.equal(dequantize(quantize(rows, layout, torch.zeros(1)).messages, layout), rows)


def test_zeros_stay_zeros_and_an_empty_message_is_one() -> None:
    for is_blockwise in (False, True):
        layout = make_layout([Piece("a", 300, True), Piece("b", 0, True)], E4M3, is_blockwise)
        messages, bits, _ = quantize(torch.zeros(2, 300), layout, torch.zeros(2))
        assert not bits.any() and not sum_rows(messages, layout, 1.0).any()
        layout = make_layout([], E4M3, is_blockwise)
        messages, bits, num_saturated = quantize(torch.zeros(2, 0), layout, torch.empty(0))
        assert sum_rows(messages, layout, 1.0).shape == (0,) and bits.shape == num_saturated.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8_format", ["E4M3", "E5M2"])
def test_what_is_beyond_the_scale_saturates_and_is_counted(fp8_format: str, dtype: torch.dtype) -> None:
    layout = make_layout([Piece("a", 8, True), Piece("b", 8, True)], DelayedScaling(fp8_format))  # type: ignore[arg-type]
    largest = LARGEST[layout.dtype]
    rows = torch.zeros(2, 16, dtype=dtype)
    rows[1, :4] = torch.tensor([1.0, -1.0, 2.0, -4.0], dtype=dtype)
    rows[0, 8] = 4.0
    messages, bits, num_saturated = quantize(rows, layout, torch.tensor([largest, 0.0]))
    assert num_saturated.tolist() == [2, 0]
    assert bits.view(torch.float32).tolist() == [4.0, 4.0]
    back = dequantize(messages, layout)
    assert back[1, :4].tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0])
    assert back[0, 8] == pytest.approx(4.0)
    # So large a scale that the product is infinite: finite values stay so.
    _, _, num_saturated = quantize(rows * 1e3, layout, torch.full((2,), 2.0**126))
    assert num_saturated.tolist() == [4, 1]
    assert dequantize(quantize(rows, layout, torch.full((2,), 2.0**126)).messages, layout).isfinite().all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("is_blockwise", [False, True])
@pytest.mark.parametrize("fp8_format", ["E4M3", "E5M2"])
@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize("key", [None, 3])
def test_what_is_not_finite_stays_so_and_is_seen(
    value: float, is_blockwise: bool, fp8_format: str, scale: float, key: int | None
) -> None:
    pieces = [Piece("a", 200, True), Piece("b", 200, False), Piece("c", 200, True)]
    layout = make_layout(pieces, DelayedScaling(fp8_format), is_blockwise)  # type: ignore[arg-type]
    for place in (150, 250):
        rows = torch.ones(2, 600)
        rows[1, place] = value
        messages, bits, num_saturated = quantize(rows, layout, torch.full((2,), scale), key)
        assert (bits >= INF_BITS).tolist() == [place == 150, False]
        assert not num_saturated.any()
        total = sum_rows(messages, layout, 1.0)
        assert not total[place].isfinite()
        last = 200 if is_blockwise and place == 150 else place + 1  # of the block
        first = 128 if is_blockwise and place == 150 else place
        assert total[:first].isfinite().all() and total[last:].isfinite().all()


def test_a_message_of_another_layout_makes_all_nan() -> None:
    mine = make_layout([Piece("a", 64, True)], E4M3)
    other = make_layout([Piece("b", 64, True)], E4M3)
    rows = torch.ones(1, 64)
    messages = torch.cat([quantize(rows, layout, torch.zeros(1)).messages for layout in (mine, mine, other)])
    assert sum_rows(messages, mine, 1.0).isnan().all()
    assert torch.equal(sum_rows(messages[:2], mine, 1.0), torch.full((64,), 2.0))


# ---------------------------------------------------------------- the sum


def snr_db(found: Tensor, exact: Tensor) -> float:
    return 10 * math.log10(exact.square().sum() / (found.double() - exact).square().sum())


def test_no_sum_is_formed_in_fp8() -> None:
    """64 ranks whose gradients correlate by 0.5: sums in FP8 leave 7 to 9 dB of it, whatever they are scaled by."""
    torch.manual_seed(0)
    num_ranks, numel = 64, 4096
    gradients = 0.5**0.5 * (torch.randn(numel) + torch.randn(num_ranks, numel))
    exact = gradients.double().mean(0)
    for is_blockwise in (False, True):
        layout = make_layout([Piece("a", numel, True)], E4M3, is_blockwise)
        scale = agreed(gradients, layout)
        messages = torch.cat([quantize(row[None], layout, scale).messages for row in gradients])
        assert snr_db(sum_rows(messages, layout, 1 / num_ranks), exact) >= 40.0
    for pre_scale in (1.0, 1 / 8, 1 / 64):  # the same in FP8, to see that this test can tell
        total = torch.zeros(numel)
        for row in gradients * pre_scale * agreed(gradients, make_layout([Piece("a", numel, True)], E4M3)):
            total = (total + row.to(torch.float8_e4m3fn).float()).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        total /= num_ranks * pre_scale * agreed(gradients, make_layout([Piece("a", numel, True)], E4M3))
        assert snr_db(total, exact) < 15.0


# ---------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    assert torch.equal(round_stochastically(numbers, dtype, torch.arange(len(numbers)), 1), numbers)
    # Between each two neighbours, a tenth of the way up: up it goes one time in ten.
    low, high = numbers[:-1], numbers[1:]
    values = (low.double() + 0.1 * (high.double() - low)).float()
    num_draws = 20_000
    index = torch.arange(num_draws)[:, None] * len(values) + torch.arange(len(values))
    rounded = round_stochastically(values.expand(num_draws, -1).contiguous(), dtype, index, 12345)
    assert ((rounded == low) | (rounded == high)).all()
    share = (rounded == high).double().mean(0)
    # Six standard deviations of a binomial share.
    assert ((share - 0.1).abs() < 6 * (0.09 / num_draws) ** 0.5).all()
    assert abs(share.mean() - 0.1) < 6 * (0.09 / num_draws / len(values)) ** 0.5


def test_random_bits_are_uniform_and_of_their_key() -> None:
    index = torch.arange(1 << 16)
    words = random_bits(index, 7)
    assert ((words >= 0) & (words < 1 << 32)).all()
    assert len(words.unique()) > (1 << 16) - 10
    for bit in range(32):
        assert abs((words >> bit & 1).double().mean() - 0.5) < 6 * 0.5 / 256
    assert torch.equal(words, random_bits(index, 7))
    # One bit more in the key, and half of the bits are others: no two keys give a shifted copy of the same numbers.
    for other in (6, 8, 7 | 1 << 31):
        changed = words ^ random_bits(index, other)
        assert abs(sum((changed >> bit & 1).double().mean() for bit in range(32)) / 32 - 0.5) < 0.01


def test_stochastic_rounding_has_no_bias_where_rounding_to_the_nearest_has() -> None:
    layout = make_layout([Piece("a", 4096, True)], E4M3)
    rows = torch.full((1, 4096), 1.02)
    rows[0, 0] = 448.0
    scale = torch.ones(1)
    nearest = dequantize(quantize(rows, layout, scale).messages, layout)[0, 1:].mean()
    assert nearest == 1.0
    found = [dequantize(quantize(rows, layout, scale, key).messages, layout)[0, 1:].mean() for key in range(16)]
    spread = 0.125 * (0.16 * 0.84) ** 0.5
    assert abs(torch.stack(found).mean() - 1.02) < 6 * spread / (16 * 4095) ** 0.5
    assert len(set(map(float, found))) == len(found)
