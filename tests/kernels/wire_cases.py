"""Gradients to be sent, hard ones and random ones, and the comparison of a backend with wire_reference.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from hypothesis import strategies as st
from sweep_checks import CPU, flush_to_zero
from sweep_values import FP8, KINDS, Codes, all_codes, codes_of, random_codes, rounding_edges
from torch import Tensor

from distscale.fp8 import CurrentScaling, DelayedScaling, wire_reference
from distscale.fp8.wire import Layout, Piece, make_layout
from distscale.fp8.wire_reference import Quantized
from distscale.sweep import INF_BITS

__all__ = ["CASES", "Backend", "Case", "answer_of", "cases", "check", "fixed_case", "mixed"]

FACTOR = 1 / 3
ROW_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = dict(zip(FP8, ("E4M3", "E5M2"), strict=True))
SCALES = [0.0, 1.0, 2.0**-126, 2.0**126, 2.0**-149, 3.4e38, 1 / 3, 1000.0, -1.0, float("nan")]


class Backend(Protocol):
    """A module like wire_reference.py."""

    def quantize(self, rows: Tensor, layout: Layout, scale: Tensor, key: int | None = None) -> Quantized: ...

    def sum_rows(self, messages: Tensor, layout: Layout, factor: float) -> Tensor: ...


@dataclass(frozen=True)
class Case:
    """Rows and how they are to be sent."""

    rows: Tensor
    layout: Layout
    scale: Tensor
    key: int | None = None

    def __repr__(self) -> str:  # a short one, for what Hypothesis prints
        return f"{tuple(self.rows.shape)} {self.rows.dtype} {self.layout} {self.scale.tolist()} key={self.key}"


class Answer(NamedTuple):
    """What the reference makes of a case. It is right without flush-to-zero only."""

    quantized: Quantized
    received: tuple[Tensor, Tensor]
    """Messages to be summed: those of the case, and random bytes."""
    totals: tuple[Tensor, Tensor]


def answer_of(case: Case) -> Answer:
    quantized = wire_reference.quantize(case.rows, case.layout, case.scale, case.key)
    received = quantized.messages, any_messages(np.random.default_rng(1), case.layout, 3)
    first, second = (wire_reference.sum_rows(messages, case.layout, FACTOR) for messages in received)
    return Answer(quantized, received, (first, second))


@cache
def fixed_case(name: str) -> tuple[Case, Answer]:
    """One of :data:`CASES` with its answer."""
    case = CASES[name]()
    return case, answer_of(case)


def check(
    backend: Backend, case: Case, answer: Answer | None = None, device: torch.device = CPU, *, flush: bool = False
) -> None:
    """A backend makes the same messages, amax bits, numbers and sums on ``device`` as the reference does.

    The sum is NaN if a message is of another layout.
    """
    want, received, totals = answer or answer_of(case)
    rows, scale, layout = case.rows.to(device), case.scale.to(device), case.layout
    with flush_to_zero(flush):
        got = Quantized(*(result.cpu() for result in backend.quantize(rows, layout, scale, case.key)))
        sums = [backend.sum_rows(messages.to(device), layout, FACTOR).cpu() for messages in received]
    _check_messages(got.messages, want.messages, layout)
    is_nan = want.bits > INF_BITS
    assert torch.equal(got.bits > INF_BITS, is_nan), (got.bits, want.bits)
    assert torch.equal(got.bits.masked_fill(is_nan, 0), want.bits.masked_fill(is_nan, 0)), (got.bits, want.bits)
    assert torch.equal(got.num_saturated, want.num_saturated), (got.num_saturated, want.num_saturated)
    for total, right in zip(sums, totals, strict=True):
        _check_equal(total, right)
    wrong = received[0].clone()
    wrong[-1, 0] ^= 1
    assert backend.sum_rows(wrong.to(device), layout, FACTOR).isnan().all()


def any_messages(random: np.random.Generator, layout: Layout, num_messages: int) -> Tensor:
    """Of random bytes: every code and every scale."""
    messages = torch.from_numpy(random.integers(0, 256, (num_messages, layout.row_bytes), dtype=np.uint8))
    messages[:, :4].view(torch.int32).fill_(layout.identity)
    return messages


def _check_messages(got: Tensor, want: Tensor, layout: Layout) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    got, want = got.clone(), want.clone()
    for segment in layout.segments:
        if not segment.piece.is_fp8:  # of a NaN in bf16 torch keeps other bits on every instruction set
            _check_equal(*(_payload(messages, segment.offset, segment.num_bytes) for messages in (got, want)))
            for messages in (got, want):
                messages[:, segment.offset : segment.offset + segment.num_bytes] = 0
    if not torch.equal(got, want):
        row, at = (got != want).nonzero()[0].tolist()
        raise AssertionError(f"row {row}, byte {at}: {got[row, at]:#x}, should be {want[row, at]:#x}; {layout}")


def _payload(messages: Tensor, offset: int, num_bytes: int) -> Tensor:
    return messages[:, offset : offset + num_bytes].view(torch.bfloat16)


def _check_equal(got: Tensor, want: Tensor) -> None:
    """Bit for bit, but for which NaN it is."""
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    assert _bits(got.masked_fill(got.isnan(), 0)) == _bits(want.masked_fill(want.isnan(), 0))


def _bits(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------- fixed cases


def rows_of(codes: Codes, dtype: torch.dtype, num_rows: int) -> Tensor:
    """Codes in rows, the last of which is filled up with zeros."""
    padded = np.append(codes, np.zeros(-len(codes) % num_rows, codes.dtype)).reshape(num_rows, -1)
    return torch.from_numpy(padded.view(f"i{codes.itemsize}")).view(dtype)


def whole(codes: Codes, row_dtype: torch.dtype, fp8: torch.dtype, scale: float, **options: Any) -> Case:
    """One tensor in two rows."""
    rows = rows_of(codes, row_dtype, 2)
    recipe = DelayedScaling(FORMATS[fp8])  # type: ignore[arg-type]
    layout = make_layout([Piece("w", rows.shape[1], True)], recipe, options.get("is_blockwise", False))
    return Case(rows, layout, torch.tensor([scale]), options.get("key"))


def mixed(row_dtype: torch.dtype, is_blockwise: bool, key: int | None) -> Case:
    """Tensors of all sizes about 16, 128 and a chunk, between them such without a value, and bf16; one has no scale."""
    random = np.random.default_rng(11)
    numels = [0, 1, 15, 16, 17, 0, 127, 128, 129, 1000, 8191, 8192, 8193, 0]
    pieces = [Piece(f"p{index}", numel, index % 4 != 2) for index, numel in enumerate(numels)]
    layout = make_layout(pieces, DelayedScaling(margin=1, power_of_two=False), is_blockwise)
    rows = rows_of(random_codes(random, row_dtype, 3 * layout.row_numel, "normal"), row_dtype, 3)
    scale = torch.tensor([(0.0, 100.0, 300.0)[index % 3] for index in range(len(layout.in_fp8))])
    return Case(rows, layout, scale, key)


def only(numels: list[int], is_fp8: bool) -> Case:
    layout = make_layout([Piece(f"p{index}", numel, is_fp8) for index, numel in enumerate(numels)], CurrentScaling())
    rows = torch.arange(2 * layout.row_numel, dtype=torch.float32).reshape(2, -1)
    return Case(rows, layout, torch.zeros(len(layout.in_fp8)))


def with_nonfinite(value: float, is_blockwise: bool) -> Case:
    case = mixed(torch.float32, is_blockwise, None)
    for segment in case.layout.segments:
        if segment.piece.numel:
            case.rows[1, (segment.start + segment.stop) // 2] = value
    return case


def laid_out(how: Callable[[Tensor], Tensor]) -> Case:
    """Values that lie in memory in another way."""
    case = mixed(torch.float32, False, None)
    return replace(case, rows=how(case.rows).view(case.rows.shape))


def _fixed() -> dict[str, Callable[[], Case]]:
    found: dict[str, Callable[[], Case]] = {
        "no tensor": lambda: only([], True),
        "no value": lambda: only([0, 0], True),
        "bf16 alone": lambda: only([5, 0, 300], False),
    }
    for fp8 in FP8:
        for how, options in _HOW.items():
            for scale in (1.0, 0.25, 1 / 3, 0.0):
                name = f"rounding edges, {fp8}, {how}, scale {scale:.2}"
                found[name] = lambda fp8=fp8, options=options, scale=scale: whole(  # type: ignore[misc]
                    rounding_edges(fp8), torch.float32, fp8, scale, **options
                )
            for dtype in (torch.float16, torch.bfloat16):
                name = f"every {dtype}, {fp8}, {how}"
                found[name] = lambda dtype=dtype, fp8=fp8, options=options: whole(  # type: ignore[misc]
                    all_codes(dtype), dtype, fp8, 3.0, **options
                )
    for scale in SCALES:
        found[f"scale {scale}"] = lambda scale=scale: whole(  # type: ignore[misc]
            rounding_edges(torch.float8_e5m2), torch.float32, torch.float8_e4m3fn, scale
        )
    for dtype in ROW_DTYPES:
        for how, options in _HOW.items():
            found[f"sizes, {dtype}, {how}"] = lambda dtype=dtype, options=options: mixed(  # type: ignore[misc]
                dtype, options.get("is_blockwise", False), options.get("key")
            )
    for value in (float("inf"), -float("inf"), float("nan")):
        for is_blockwise in (False, True):
            name = f"one {value} a tensor, {'blocks' if is_blockwise else 'tensors'}"
            found[name] = lambda value=value, is_blockwise=is_blockwise: with_nonfinite(  # type: ignore[misc]
                value, is_blockwise
            )
    found |= {
        "rows that begin anywhere": lambda: laid_out(lambda rows: torch.cat([rows[0, :1], rows.flatten()])[1:]),
        "rows that lie apart": lambda: laid_out(lambda rows: torch.cat([rows, rows], dim=1)[:, : rows.shape[1]]),
        "columns": lambda: laid_out(lambda rows: rows.t().contiguous().t()),
    }
    for amax in (1e-39, 1e-45, 3.4e38):
        found[f"amax {amax}"] = lambda amax=amax: whole(  # type: ignore[misc]
            codes_of(np.linspace(-amax, amax, 501), torch.float32), torch.float32, torch.float8_e4m3fn, 0.0
        )
    return found


_HOW: Mapping[str, Mapping[str, Any]] = {
    "nearest": {},
    "at random": {"key": 0xDEADBEEF},
    "blocks": {"is_blockwise": True},
    "blocks at random": {"is_blockwise": True, "key": 5},
}
CASES = _fixed()
"""By name."""


# ---------------------------------------------------------------- random cases


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layouts of a few tensors with values of every kind, each tensor its own."""
    numels = draw(st.lists(st.sampled_from([0, 1, 3, 16, 100, 128, 129, 300, 1000]), max_size=6))
    pieces = [Piece(f"p{index}", numel, draw(st.integers(0, 3)) > 0) for index, numel in enumerate(numels)]
    recipe = DelayedScaling(
        draw(st.sampled_from(["E4M3", "E5M2", "HYBRID"])),
        margin=draw(st.integers(0, 16)),
        power_of_two=draw(st.booleans()),
    )
    layout = make_layout(pieces, recipe, draw(st.booleans()))
    dtype, num_rows = draw(st.sampled_from(ROW_DTYPES)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = [
        rows_of(random_codes(random, dtype, num_rows * numel, draw(st.sampled_from(KINDS))), dtype, num_rows)
        for numel in numels
    ]
    rows = torch.cat([torch.empty(num_rows, 0, dtype=dtype), *columns], dim=1)
    some = st.one_of(st.sampled_from(SCALES), st.floats(0, 2.0**20, width=32))
    scale = torch.tensor([draw(some) for _ in layout.in_fp8], dtype=torch.float32)
    return Case(rows, layout, scale, draw(st.none() | st.integers(0, 2**32 - 1)))
