"""What a sweep must not do with wrong arguments: write elsewhere, read elsewhere, or give a wrong number."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distscale.sweep import Limits, Part, nvrtc, scale_, sweep
from distscale.sweep.reference import subnormals_kept, sum_of_squares

CPU = torch.device("cpu")
ONE = torch.ones((), dtype=torch.float64)


@pytest.fixture(params=["native", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DISTSCALE_SWEEP", request.param)
    return request.param


@pytest.mark.parametrize("slot", [-1, 3, 2**30])
def test_a_slot_that_is_not_there(slot: int) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        sweep([Part(torch.ones(4), slot, 1.0, True)], 3, ONE, True, CPU)


@pytest.mark.parametrize("group", [-1, 2, 2**30])
def test_a_group_that_is_not_there(group: int) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        sweep([Part(torch.ones(4), 0, 1.0, True, group=group)], 3, ONE, True, CPU, num_groups=2)


@pytest.mark.parametrize(
    "make_out",
    [
        lambda: torch.zeros(64)[8:24],
        lambda: torch.zeros(64)[8:8],
        lambda: torch.zeros(8, 5),
        lambda: torch.zeros(40, device="meta"),
    ],
    ids=["shorter", "empty", "of another shape", "on another device"],
)
def test_an_out_that_is_not_like_the_values(make_out: Callable[[], Tensor]) -> None:
    out = make_out()
    with pytest.raises(ValueError, match="must be like the values"):
        sweep([Part(torch.ones(40), 0, 1.0, True, out=out)], 1, ONE, True, CPU)
    assert out.is_meta or not (out._base if out._base is not None else out).any()


def test_memory_that_was_freed(backend: str) -> None:
    if backend == "reference":
        pytest.skip("torch itself ends the process when it reads freed memory")
    values, out = torch.ones(4), torch.ones(4)
    out.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has been freed"):
        sweep([Part(values, 0, 1.0, True, out=out)], 1, ONE, True, CPU)
    with pytest.raises(RuntimeError, match="has been freed"):
        sweep([Part(out, 0, 1.0, True)], 1, ONE, True, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_numbers_of_another_dtype_mean_the_same(dtype: torch.dtype) -> None:
    values = torch.full((4,), 3.0)
    slots, sums, _ = sweep([Part(values, 0, 1.0, True)], 1, torch.tensor(0.5, dtype=dtype), True, CPU)
    assert (slots.view(torch.float32).item(), sums.item()) == (1.5, 9.0)
    scale_([values], torch.tensor(2.0, dtype=dtype), torch.tensor(1.0, dtype=dtype))
    assert values.tolist() == [3.0] * 4
    scale_([values], torch.tensor(2.0, dtype=dtype), torch.tensor(0.0, dtype=dtype))
    assert values.tolist() == [6.0] * 4
    scale_inv = torch.tensor([0.5], dtype=dtype)
    slots, _, _ = sweep([Part(values, 0, 1.0, False, scale_inv=scale_inv)], 1, ONE, True, CPU)
    assert slots.view(torch.float32).item() == 3.0


def test_more_than_one_scale_inv_is_refused() -> None:
    with pytest.raises(RuntimeError):
        sweep([Part(torch.ones(4), 0, 1.0, False, scale_inv=torch.ones(2))], 1, ONE, True, CPU)


def test_limits_may_be_whole_numbers() -> None:
    values = torch.tensor([0.0, 1.0, 1.5, 2.0])
    _, _, counts = sweep([Part(values, 0, 1.0, True)], 1, ONE, False, CPU, limits=Limits(1, 2))
    assert counts.tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_view_of_the_other_sign(dtype: torch.dtype) -> None:
    negative = torch._neg_view(torch.full((4,), 3.0, dtype=dtype))
    out = torch.zeros(4, dtype=dtype)
    slots, _, _ = sweep([Part(negative, 0, 1.0, False, out=out)], 1, ONE, True, CPU)
    assert slots.view(torch.float32).item() == 3.0
    assert out.tolist() == negative.tolist() == [-3.0] * 4


def test_a_tensor_given_twice_is_multiplied_once() -> None:
    values = torch.ones(1 << 20)
    scale_([values, values], torch.tensor(2.0))
    assert (values == 2.0).all()


def test_threads_keep_the_number_of_threads() -> None:
    num_threads = torch.get_num_threads()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no flush-to-zero mode")

    def work() -> None:
        torch.set_flush_denormal(True)
        for _ in range(50):
            with subnormals_kept():
                sum_of_squares([torch.ones(10, dtype=torch.float64)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_flush_denormal(False)
    assert torch.get_num_threads() == num_threads


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", nvrtc.CACHE_SETTING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user that no list knows
    assert nvrtc.cache_directory() is None
    monkeypatch.setenv(nvrtc.CACHE_SETTING, str(tmp_path))
    assert nvrtc.cache_directory() == tmp_path
