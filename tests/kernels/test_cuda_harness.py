"""The CUDA kernels, run on the host by simt.h: the cases of every sweep, and what is theirs alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from simt import HostGpu, build
from sweep_cases import (
    CASES,
    NATIVE,
    SMALL,
    Case,
    Shard,
    cases,
    check_patterns,
    check_scale,
    check_sweep,
    narrowing,
    random_codes,
    widening,
)

from distscale import ProtocolError
from distscale.sweep import Limits, Part, cuda, nvrtc
from distscale.sweep.parts import Request, Swept

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))
SOURCES = Path(cuda.__file__).parent


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("simt"))


@pytest.fixture(scope="module", params=["chunks as on a GPU", "small chunks"])
def gpu(request: pytest.FixtureRequest, library: Path) -> Iterator[HostGpu]:
    with pytest.MonkeyPatch.context() as patch:
        yield in_place_of_a_gpu(patch, HostGpu(library), small_chunks=request.param == "small chunks")


def in_place_of_a_gpu(patch: pytest.MonkeyPatch, gpu: HostGpu, small_chunks: bool) -> HostGpu:
    patch.setattr(cuda, "load", lambda device: gpu)
    if small_chunks:  # cut even a short tensor into several, as a long one is
        patch.setattr(cuda, "_LEAST_CHUNK", 256)
        patch.setattr(cuda, "_CHUNK_STEP", 256)
        patch.setattr(cuda, "_USUAL_CHUNK", 512)
    return gpu


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@pytest.mark.parametrize("name", CASES)
def test_fixed_cases_on_the_host(gpu: HostGpu, name: str, flush: bool) -> None:
    check_sweep(cuda, CASES[name](), flush=flush)


@settings(max_examples=100 * EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_random_cases_on_the_host(gpu: HostGpu, case: Case) -> None:
    check_sweep(cuda, case)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_pattern_on_the_host(gpu: HostGpu, dtype: torch.dtype) -> None:
    shifts = range(16) if dtype.itemsize == 1 else (0, 5)
    for out in NATIVE:
        check_sweep(cuda, widening(dtype, out, shifts))
    check_sweep(cuda, narrowing(dtype, shifts))
    check_patterns(cuda, dtype, step=1 if dtype.itemsize == 1 else 61)


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0, float("nan")])
@pytest.mark.parametrize("factor", [1 / 3, 2.0**-149, 1.0, float("inf")])
def test_scaling_on_the_host(gpu: HostGpu, factor: float, found_inf: float | None) -> None:
    random = np.random.default_rng(3)
    shards = [
        Shard(random_codes(random, dtype, numel, "any"), dtype, offset=offset)
        for dtype in NATIVE
        for numel, offset in ((0, 0), (1, 3), (17, 1), (4099, 2))
    ]
    check_scale(cuda, shards, factor, found_inf)


def test_one_launch_whatever_is_swept(gpu: HostGpu) -> None:
    gpu.launches.clear()
    sweep([torch.ones(100, dtype=dtype) for dtype in NATIVE])
    sweep([torch.ones(100, dtype=dtype) for dtype in NATIVE], limits=Limits.of(torch.float16))
    assert gpu.launches == ["sweep", "sweep_and_write"]


def test_the_order_of_blocks_changes_no_bit(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = in_place_of_a_gpu(monkeypatch, HostGpu(library, num_blocks=5), small_chunks=True)
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in (5000, 17, 1, 0, 9999)]
    first = sweep(tensors)
    assert first.sums is not None
    for _ in range(10):
        again = sweep(tensors)
        assert again.sums is not None
        assert torch.equal(first.sums, again.sums) and torch.equal(first.slots, again.slots)
    assert gpu.seed == 11


def test_a_graph_is_captured_only_with_its_tables_there(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = in_place_of_a_gpu(monkeypatch, HostGpu(library), small_chunks=False)
    known, factor = [torch.ones(10), torch.ones(20)], torch.tensor(0.5)
    sweep(known)
    gpu.is_in_capture = True
    monkeypatch.setattr(cuda, "_in_graphs", [])
    sweep([tensor + 1 for tensor in known])
    assert [table.num_chunks for table in cuda._in_graphs] == [2], "the graph reads a table that is not kept"
    with pytest.raises(ProtocolError, match="run the step once before the capture"):
        sweep([torch.ones(11)])
    with pytest.raises(ProtocolError, match="run the step once before the capture"):
        cuda.scale_(known, factor, None)
    gpu.is_in_capture = False
    cuda.scale_(known, factor, None)
    gpu.is_in_capture = True
    cuda.scale_(known, factor, None)
    assert known[0][0] == 0.25


def test_what_a_sweep_allocates_is_bounded(library: Path) -> None:
    """C33: the kernel's cells and tables, however large the gradients are."""
    gpu = HostGpu(library, num_blocks=132 * 5)
    one = cuda._table(gpu, "sweep", (1 << 40,), np.int32(0).tobytes())
    assert one.num_chunks <= 16 * 660 and one.num_blocks == 660
    assert one.num_chunks * one.chunk_bytes >= 4 << 40
    many = cuda._table(gpu, "sweep", (1 << 30,) * 64, np.zeros(64, np.int32).tobytes())
    assert many.num_chunks <= 16 * 660 + 64
    assert cuda._table(gpu, "sweep", (0, 0), np.zeros(2, np.int32).tobytes()).num_blocks == 1


def test_chunks_share_a_tensor_out_evenly(library: Path) -> None:
    """So that no block has a round more to do than the others."""
    gpu = HostGpu(library, num_blocks=660)
    for numel in (1 << 26, 3 << 24, (1 << 30) + 5):
        table = cuda._table(gpu, "sweep", (numel,), np.int32(1).tobytes())
        rounds = -(-table.num_chunks // table.num_blocks)
        assert rounds * table.num_blocks * table.chunk_bytes < 1.1 * 2 * numel


@pytest.mark.parametrize(
    ("there", "instead", "why"),
    [
        ("  __syncthreads();\n  if (threadIdx.x != 0) return 0;", "  if (threadIdx.x != 0) return 0;", "no barrier"),
        ("  __syncthreads();\n  if (threadIdx.x != 0) return 0;", "  if (threadIdx.x) __syncthreads();", "some only"),
    ],
)
def test_the_harness_sees_a_missing_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, instead: str, why: str
) -> None:
    copied = nvrtc.Program(tuple(Path(shutil.copy(path, tmp_path)) for path in nvrtc.SWEEP.files), nvrtc.SWEEP.kernels)
    source = (SOURCES / "sweep.cu").read_text()
    assert source.count(there) == 1
    (tmp_path / "sweep.cu").write_text(source.replace(there, instead))
    in_place_of_a_gpu(monkeypatch, HostGpu(build(tmp_path, copied)), small_chunks=True)
    tensor = torch.ones(5000)

    def sweeps() -> None:
        for _ in range(20):
            found = sweep([tensor])
            assert found.sums is not None and found.sums.item() == 5000

    with pytest.raises(AssertionError):
        sweeps()


def sweep(tensors: list[torch.Tensor], limits: Limits | None = None) -> Swept:
    parts = [Part(tensor, slot, 1.0, False) for slot, tensor in enumerate(tensors)]
    return cuda.sweep(parts, Request(len(parts), torch.ones((), dtype=torch.float64), True, limits=limits))
