"""Messages by the CUDA kernels, run on the host by simt.h, against wire_reference.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from simt import HostGpu, build
from wire_cases import CASES, Case, cases, check, fixed_case, mixed

from distscale import ProtocolError
from distscale.fp8 import wire_cuda, wire_plan
from distscale.sweep import nvrtc

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("simt"), wire_cuda.WIRE)


@pytest.fixture(scope="module", params=[64 * 128, 3 * 128], ids=["chunks as on a GPU", "small chunks"])
def gpu(request: pytest.FixtureRequest, library: Path) -> Iterator[HostGpu]:
    gpu = HostGpu(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_cuda, "load", lambda device: gpu)
        patch.setattr(wire_plan, "_CHUNK_NUMEL", request.param)
        yield gpu


@pytest.mark.parametrize("name", CASES)
def test_fixed_messages_on_the_host(gpu: HostGpu, name: str) -> None:
    check(wire_cuda, *fixed_case(name))


@settings(max_examples=50 * EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_random_messages_on_the_host(gpu: HostGpu, case: Case) -> None:
    check(wire_cuda, case)


def test_a_layout_is_sent_to_the_gpu_once(gpu: HostGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call sends nothing, and so waits for nothing, whatever its scales and its key are."""
    case = mixed(torch.float16, False, None)
    wire_cuda.sum_rows(wire_cuda.quantize(case.rows, case.layout, case.scale).messages, case.layout, 1.0)
    monkeypatch.setattr(gpu, "send", None)
    gpu.launches.clear()
    messages = wire_cuda.quantize(case.rows, case.layout, case.scale * 2, key=3).messages
    wire_cuda.sum_rows(messages, case.layout, 0.5)
    assert gpu.launches == ["find_amax", "quantize", "sum_rows"]


def test_a_graph_is_captured_only_with_its_layout_there(gpu: HostGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    case, new = mixed(torch.float32, False, None), mixed(torch.bfloat16, False, None)
    wire_cuda.quantize(case.rows, case.layout, case.scale)
    monkeypatch.setattr(wire_cuda, "_in_graphs", [])
    monkeypatch.setattr(gpu, "is_in_capture", True)
    wire_cuda.quantize(case.rows, case.layout, case.scale)
    assert len(wire_cuda._in_graphs) == 1, "the graph reads a table that is not kept"
    with pytest.raises(ProtocolError, match="run the step once before the capture"):
        wire_cuda.quantize(new.rows[:2], new.layout, new.scale)


def test_the_cache_depends_on_all_that_is_compiled(tmp_path: Path) -> None:
    files = wire_cuda.WIRE.files
    included = {name for file in files for name in re.findall(r'#include "(.+)"', file.read_text())}
    assert {file.name for file in files} == {"wire.cu", *included}
    keys = {nvrtc._key(wire_cuda.WIRE, "sm_90", "13.0")}
    for changed in files:
        copies = tuple(tmp_path / file.name for file in files)
        for copy, file in zip(copies, files, strict=True):
            copy.write_bytes(file.read_bytes() + (b"\n" if file == changed else b""))
        keys.add(nvrtc._key(wire_cuda.WIRE._replace(files=copies), "sm_90", "13.0"))
    assert len(keys) == 1 + len(files)
