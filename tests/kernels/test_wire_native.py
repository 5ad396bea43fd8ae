"""Messages by the CPU library, on each instruction set, and on a GPU, against wire_reference.py; what is chosen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from isas import ISAS, on_isa
from sweep_checks import CPU, flush_to_zero
from wire_cases import CASES, Backend, Case, answer_of, cases, check, fixed_case, mixed

from distscale.fp8 import CurrentScaling, sender, wire_cpu, wire_kernels, wire_plan, wire_reference
from distscale.fp8.wire import Piece, make_layout
from distscale.sweep.choice import SETTING

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))


BACKENDS = [*ISAS, *(["cuda"] if torch.cuda.is_available() else [])]


class Native(NamedTuple):
    backend: Backend
    device: torch.device


@pytest.fixture(scope="module", params=BACKENDS)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Native]:
    if request.param == "cuda":
        from distscale.fp8 import wire_cuda

        yield Native(wire_cuda, torch.device("cuda", torch.cuda.current_device()))
    else:
        with on_isa(request.param, tmp_path_factory.mktemp(request.param)):
            yield Native(wire_cpu, CPU)


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@pytest.mark.parametrize("name", CASES)
def test_fixed_messages(native: Native, name: str, flush: bool) -> None:
    check(native.backend, *fixed_case(name), native.device, flush=flush)


@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flush-to-zero"])
@settings(max_examples=50 * EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_random_messages(native: Native, case: Case, flush: bool) -> None:
    check(native.backend, case, device=native.device, flush=flush)


def test_messages_are_the_same_on_any_number_of_threads(native: Native) -> None:
    """Enough bytes that several are worth it; one of the tensors has no scale."""
    layout = make_layout([Piece("a", 700_001, True), Piece("b", 300, False), Piece("c", 9000, True)], CurrentScaling())
    rows = torch.randn(3, layout.row_numel, generator=torch.Generator().manual_seed(1))
    case = Case(rows, layout, torch.tensor([0.0, 50.0]), 7)
    answer = answer_of(case)
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            check(native.backend, case, answer, native.device)
    finally:
        torch.set_num_threads(1)


def test_messages_leave_rows_and_the_flush_to_zero_mode_alone(native: Native) -> None:
    case = mixed(torch.float32, False, None)
    rows, scale = case.rows.to(native.device), case.scale.to(native.device)
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    for mode in (True, False):
        with flush_to_zero(mode):
            messages = native.backend.quantize(rows, case.layout, scale).messages
            native.backend.sum_rows(messages, case.layout, 1.0)
            assert ((smallest * 1.0) == 0).item() is mode
    assert torch.equal(rows.cpu().view(torch.int32), case.rows.view(torch.int32))


@pytest.mark.parametrize("chunk_numel", [128, 384])
def test_messages_in_chunks_of_a_few_blocks(native: Native, chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_plan, "_CHUNK_NUMEL", chunk_numel)
    check(native.backend, *fixed_case("sizes, torch.float32, blocks at random"), native.device)


# ---------------------------------------------------------------- what is chosen


def test_native_code_is_chosen_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case, answer = fixed_case("sizes, torch.float32, nearest")
    monkeypatch.delenv(SETTING, raising=False)
    with monkeypatch.context() as without:
        without.delattr(wire_reference, "quantize")
        without.delattr(wire_reference, "sum_rows")
        check(wire_kernels, case, answer)
    monkeypatch.setattr(wire_cpu, "quantize", None)
    monkeypatch.setattr(wire_cpu, "sum_rows", None)
    monkeypatch.setenv(SETTING, "reference")
    check(wire_kernels, case, answer)


def test_rows_of_another_dtype_are_left_to_torch() -> None:
    case = mixed(torch.float32, False, None)
    rows = case.rows.double() / 3
    want = wire_reference.quantize(rows, case.layout, case.scale)
    assert torch.equal(wire_kernels.quantize(rows, case.layout, case.scale).messages, want.messages)


def test_the_sender_uses_it() -> None:
    assert sender.quantize is wire_kernels.quantize and sender.sum_rows is wire_kernels.sum_rows
