"""Every sweep against the oracle of sweep_cases.py: the reference, the CPU library on each instruction set, CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import sweep_memory
import torch
from hypothesis import HealthCheck, given, settings
from isas import ISAS, on_isa
from sweep_cases import (
    CASES,
    CPU,
    NATIVE,
    NUMPY,
    SMALL,
    Case,
    Shard,
    cases,
    check_patterns,
    check_scale,
    check_sweep,
    flush_to_zero,
    narrowing,
    random_codes,
    widening,
)

from distscale.sweep import Limits, Part, cpu, reference
from distscale.sweep.parts import Request, Swept

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))
BACKENDS = ["reference", *(f"cpu-{isa}" for isa in ISAS), *(["cuda"] if torch.cuda.is_available() else [])]


class Native(NamedTuple):
    backend: ModuleType
    device: torch.device


@pytest.fixture(scope="module", params=BACKENDS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Native]:
    kind, _, isa = request.param.partition("-")
    if kind == "reference":
        yield Native(reference, CPU)
    elif kind == "cuda":
        from distscale.sweep import cuda

        yield Native(cuda, torch.device("cuda", torch.cuda.current_device()))
    else:
        with on_isa(isa, tmp_path_factory.mktemp(isa)):
            yield Native(cpu, CPU)


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@pytest.mark.parametrize("name", CASES)
def test_fixed_cases(native: Native, name: str, flush: bool) -> None:
    check_sweep(*_with(native, CASES[name]()), flush=flush)


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@settings(max_examples=80 * EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_random_cases(native: Native, case: Case, flush: bool) -> None:
    check_sweep(*_with(native, case), flush=flush)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_pattern_is_widened_and_narrowed(native: Native, dtype: torch.dtype) -> None:
    for out in NATIVE:
        check_sweep(*_with(native, widening(dtype, out)))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_rounding_to_nearest_even(native: Native, dtype: torch.dtype) -> None:
    check_sweep(*_with(native, narrowing(dtype)))


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_amax_square_and_counts_of_every_pattern(native: Native, dtype: torch.dtype) -> None:
    # The reference takes half a millisecond a part.
    check_patterns(native.backend, dtype, native.device, step=61 if native.backend is reference else 1)


SCALED = [
    Shard(random_codes(np.random.default_rng(index), dtype, numel, kind), dtype, offset=offset, layout=layout)
    for index, dtype in enumerate(NUMPY)
    for kind in ("normal", "any", "subnormal")
    for numel, offset, layout in (
        (0, 0, "flat"), (1, 3, "flat"), (17, 1, "flat"), (4099, 2, "flat"), (210, 1, "permuted"), (210, 0, "gapped")
    )
]  # fmt: skip


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@pytest.mark.parametrize("found_inf", [None, 0.0])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 2.0**-30, 2.0**20, 2.0**-126, 2.0**-149, 1.0, 0.0, float("inf")])
def test_scaling(native: Native, factor: float, found_inf: float | None, flush: bool) -> None:
    check_scale(native.backend, SCALED, factor, found_inf, native.device, flush=flush)
    dense = [shard for shard in SCALED if shard.layout != "gapped" and shard.dtype in NATIVE]
    check_scale(native.backend, dense, factor, found_inf, native.device, flush=flush)


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@pytest.mark.parametrize("found_inf", [1.0, float("inf"), float("nan")])
def test_scaling_touches_nothing_after_an_overflow(native: Native, found_inf: float, flush: bool) -> None:
    dense = [shard for shard in SCALED if shard.layout != "gapped" and shard.dtype in NATIVE]
    check_scale(native.backend, SCALED, 0.5, found_inf, native.device, flush=flush)
    check_scale(native.backend, dense, 0.5, found_inf, native.device, flush=flush)


def test_scaling_of_every_pattern(native: Native) -> None:
    for dtype in SMALL:
        codes = np.arange(256**dtype.itemsize, dtype=np.uint32).astype(f"u{dtype.itemsize}")
        check_scale(native.backend, [Shard(codes, dtype)], 0.75, device=native.device)


def test_the_same_bits_every_time_and_on_any_number_of_threads(native: Native) -> None:
    rng = np.random.default_rng(1)
    values = [torch.from_numpy(rng.standard_normal(numel)) for numel in (2**21 + 5, 2**20, 100_001, 17)]
    parts = [
        Part(value.to(native.device, dtype), slot=index, weight=1 / 3, is_scaled=True, group=index % 2)
        for index, (value, dtype) in enumerate(zip(values, NATIVE, strict=False))
    ]
    request = Request(len(parts), torch.tensor(0.3, dtype=torch.float64), True, 2, Limits.of(torch.float16))
    assert native.backend.takes(parts)
    found = []
    try:
        # How the reference divides its work is up to torch.
        for num_threads in (1, 1) if native.backend is reference else (1, 1, 2, 3, 2):
            torch.set_num_threads(num_threads)
            found.append(_bits(native.backend.sweep(parts, request)))
    finally:
        torch.set_num_threads(1)
    assert all(bits == found[0] for bits in found)


def test_the_caller_keeps_its_flush_to_zero_mode(native: Native) -> None:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    for mode in (True, False):
        with flush_to_zero(mode):
            parts = [Part(torch.ones(100, device=native.device), 0, 1.0, True)]
            native.backend.sweep(parts, Request(1, torch.tensor(0.5, dtype=torch.float64), True))
            native.backend.scale_([part.values for part in parts], torch.tensor(0.5), None)
            assert ((smallest * 1.0) == 0).item() is mode


def test_memory_does_not_grow_with_the_gradients(native: Native) -> None:
    """C33. Of the reference, the largest block that torch is asked for; else all of the process, or of the GPU."""
    if native.backend is reference:
        few, many = (sweep_memory.largest_block(reference, numel) for numel in (2**19, 2**21))
        assert 0 < many <= few < 2**22
        return
    if native.device.type == "cuda":
        run = sweep_memory.use(native.backend, sweep_memory.NUMEL, native.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        grown = torch.cuda.max_memory_allocated() - before
    else:
        grown = int(subprocess.check_output([sys.executable, sweep_memory.__file__, native.backend.__name__]))
    assert grown < 4 * 2**20, "bytes; a mask of the values would be 16 MiB"


def _with(native: Native, case: Case) -> tuple[ModuleType, Case, torch.device]:
    return native.backend, case, native.device


def _bits(swept: Swept) -> tuple[list[int], list[int], list[list[int]]]:
    assert swept.sums is not None
    return swept.slots.tolist(), swept.sums.view(torch.int64).tolist(), swept.counts.tolist()
