"""Runs a backend on tensors that lie between canaries and compares all that there is with the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from sweep_oracle import NAN_BITS, Case, Expected, Shard, unscaled
from sweep_values import NATIVE, Codes, all_codes, one_nan, values_of

from distscale.sweep import INF_BITS, Count, Limits, Part, reference
from distscale.sweep.choice import Backend
from distscale.sweep.parts import Request, Swept

__all__ = ["CPU", "check_patterns", "check_scale", "check_sweep", "flush_to_zero", "strides_of"]

CPU = torch.device("cpu")
NORM_TOLERANCE = 1e-6
_CANARY = 0xA5
_MARGIN = 512  # bytes on either side, more than a vector; a multiple of the alignment that offsets count from


class Placed:
    """A tensor with canaries before, after and in its gaps."""

    def __init__(self, codes: Codes, dtype: torch.dtype, device: torch.device, offset: int, layout: str) -> None:
        shape, strides = strides_of(codes.size, layout)
        width = dtype.itemsize
        span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if codes.size else 0
        start = _MARGIN + offset * width
        self.canvas = torch.full((start + span * width + _MARGIN,), _CANARY, dtype=torch.uint8, device=device)
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


def strides_of(numel: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


def check_sweep(backend: Backend, case: Case, device: torch.device = CPU, *, flush: bool = False) -> Swept:
    """Sweeps and compares all that there is with the oracle; returns what was found.

    It must take every dense tensor of the five dtypes. What a backend does not take goes through the reference, as it
    does in :func:`distscale.sweep.sweep`; parts that it does not take together are swept one by one as well.
    """
    wanted = case.expected
    values = [Placed(shard.codes, shard.dtype, device, shard.offset, shard.layout) for shard in case.shards]
    outs = [_placed_out(shard, device) for shard in case.shards]
    parts = [_part(*both, device) for both in zip(case.shards, values, outs, strict=True)]
    if all(_must_take(shard) for shard in case.shards):
        assert backend.takes(parts)
    takes = backend.takes(parts)
    if not takes and len(parts) > 1:
        for shard in case.shards:
            alone = replace(case, shards=[replace(shard, slot=0, group=0)])
            check_sweep(backend, alone, device, flush=flush)
    request = Request(
        case.num_slots,
        torch.tensor(case.inv_scale, dtype=torch.float64, device=device),
        case.want_norm,
        case.num_groups,
        case.limits,
    )
    with flush_to_zero(flush):
        swept = (backend if takes else reference).sweep(parts, request)
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
    magnitudes = np.abs(values_of(codes, dtype))
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
        wanted = [unscaled(shard.codes, shard.dtype, factor32, shard.dtype) for shard in shards]
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
    slots = np.where(slots > INF_BITS, NAN_BITS, slots)
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
    got, wanted = one_nan(got, dtype), one_nan(wanted, dtype)
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
