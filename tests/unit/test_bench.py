"""The benchmark measures what it says: fairly, in place without drift, and against the targets as they are set."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from distscale import ConfigError, bench, machine
from distscale.bench import fp8 as bench_fp8
from distscale.bench import memory, timing, wire
from distscale.bench.candidate import DTYPES, candidates, gradients
from distscale.bench.fp8 import NUM_RANKS, UNIT_TENSORS, Unit, fp8_candidates
from distscale.bench.table import table
from distscale.bench.target import targets
from distscale.bench.timing import Timing, interleaved
from distscale.commands import bench as commands

CPU = torch.device("cpu")


def took(ms: float) -> Timing:
    return Timing.of([ms] * 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run returns its own duration."""
    monkeypatch.setattr(timing, "_cpu_ms", lambda run: run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "num_tensors"), [(10_000, 7), (5, 5), (9, 1)])
def test_gradients_are_random_and_finite_when_doubled(dtype: str, numel: int, num_tensors: int) -> None:
    grads = gradients(numel, num_tensors, DTYPES[dtype], CPU)
    sizes = [grad.numel() for grad in grads]
    assert (len(sizes), sum(sizes)) == (num_tensors, numel)
    assert max(sizes) - min(sizes) <= 1
    values = torch.cat([grad.float() for grad in grads])
    assert torch.isfinite((2 * values).to(DTYPES[dtype]).float()).all()
    if numel > 100:
        assert values.unique().numel() > 100
        assert (values == 0).float().mean() < 0.05


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "e4m3", "e5m2"])
def test_work_in_place_leaves_the_values(dtype: str) -> None:
    grads = gradients(4000, 3, DTYPES[dtype], CPU)
    subnormal = torch.finfo(DTYPES[dtype]).smallest_normal
    for grad in grads:  # halving rounds them, which cannot be undone
        grad.copy_(torch.where(grad.float().abs() < 2 * subnormal, 0.0, grad.float()))
    before = [grad.clone().view(torch.uint8) for grad in grads]
    for candidate in candidates(grads):
        try:
            candidate.run()
        except (RuntimeError, TypeError):
            assert candidate.side == "torch"
            assert DTYPES[dtype].itemsize == 1
            continue
        candidate.run()
        after = [grad.view(torch.uint8) for grad in grads]
        assert all(map(torch.equal, before, after)), candidate.key


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_the_kernels_of_fp8_do_the_work_that_torch_does(dtype: str) -> None:
    grads = [grad[:1000].view(NUM_RANKS, -1) for grad in gradients(3000, 3, torch.float32, CPU)]
    unit = Unit(grads, DTYPES[dtype])
    (messages, bits, num_saturated), by_torch = unit.cast(), unit.cast_by_torch()
    assert torch.equal(bits.view(torch.float32), torch.stack([amax for amax, _ in by_torch]))
    assert not num_saturated.any()
    for _, values in by_torch:  # in the messages they come one after the other
        assert values.dtype == DTYPES[dtype] and len(values) == NUM_RANKS
        rows = values.contiguous().view(torch.uint8)
        assert (messages.unfold(1, rows.shape[1], 1) == rows[:, None]).all(dim=(0, 2)).any()
    torch.testing.assert_close(unit.sum(), torch.cat(unit.sum_by_torch()))


def test_each_unit_of_fp8_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    found = {one.key: one for one in fp8_candidates(20_000, 2 * UNIT_TENSORS + 1, torch.float8_e4m3fn, CPU)}
    for one in found.values():
        assert one.limit in (None, *found) and one.rival in (None, *found)
    for name in ("quantize", "sum_rows"):
        real = getattr(bench_fp8, name)
        monkeypatch.setattr(bench_fp8, name, lambda *args, real=real, name=name: (done.append(name), real(*args))[1])
    for key in ("cast", "sum", "torch_cast", "torch_sum"):
        found[key].run()
    assert done == ["quantize"] * 3 + ["sum_rows"] * 3


@pytest.mark.parametrize(
    ("numel", "num_tensors", "used"), [(64, 64, 512), (23, 2, 16), (1008, 2, 1008), (20_000, 9, 9 * 2216)]
)
def test_the_bytes_of_fp8_are_those_of_what_is_cast(numel: int, num_tensors: int, used: int) -> None:
    """Each tensor has a row for each rank, so its values are a multiple of their number, and not none."""
    found = {one.key: one for one in fp8_candidates(numel, num_tensors, torch.float8_e5m2, CPU)}
    assert found["copy_fp32"].num_bytes == 8 * used
    assert found["cast"].num_bytes == 5 * used
    assert found["sum"].num_bytes == used + 4 * used // NUM_RANKS
    result = bench.Measured(found["cast"], took(2.0))
    assert result.gb_per_s == pytest.approx(5 * used / 2e-3 / 1e9)


def test_the_bytes_of_a_sweep_are_those_of_its_gradients() -> None:
    found = {one.key: one.num_bytes for one in candidates(gradients(1001, 3, torch.bfloat16, CPU))}
    assert (found["copy"], found["sweep"], found["sweep_scale"]) == (4004, 2002, 6006)
    assert (found["torch_sequence"], found["torch_sequence_amax"]) == (10010, 12012)


def test_memory_for_a_value_of_each_rank_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "available_memory", lambda device: 100_000)
    bench.Options(numel=4000, num_tensors=5, dtypes=("e4m3",)).check()
    with pytest.raises(ConfigError, match=r"^4000 elements need .* are free"):
        bench.Options(numel=4000, num_tensors=4000, dtypes=("e4m3",)).check()


def test_more_threads_than_the_machine_bears_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(ConfigError, match="--threads 9 is not allowed: at most 8, four for each of the 2 CPUs"):
        commands.bench(threads=9)


@pytest.mark.parametrize(
    ("world_size", "arguments", "said"),
    [
        (1, [], "nothing is sent on one rank.*torchrun --nproc-per-node 2"),
        (2, ["--rounds", "0"], "--rounds 0 .*1 or more"),
        (2, ["--mib", "0"], "--mib 0 .*1 or more"),
        (2, ["--mib", "-1"], "--mib -1 .*1 or more"),
    ],
)
def test_what_cannot_be_measured_on_the_wire_is_said_before(
    world_size: int,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wire, "init_distributed", lambda: None)
    monkeypatch.setattr(wire.dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(wire.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(wire, "measure", lambda *arguments: pytest.fail("it was measured"))
    monkeypatch.setattr(sys, "argv", ["wire", *arguments])
    with pytest.raises(SystemExit) as ended:
        wire._main()
    assert ended.value.code == 2
    assert re.search(f"error: {said}", capsys.readouterr().err)


def test_other_dtypes_have_no_kernels_of_fp8() -> None:
    assert not list(fp8_candidates(100, 2, torch.float16, CPU))


def test_everything_takes_turns(clock: None) -> None:
    calls: list[str] = []

    def run(name: str, ms: float) -> Callable[[], float]:
        def call() -> float:
            calls.append(name)
            return ms

        return call

    rounds: list[int] = []
    quick, slow = interleaved([run("quick", 1.0), run("slow", 100.0)], CPU, 20, 1.0, rounds.append)
    assert (quick.samples_ms, slow.samples_ms) == ((1.0,) * 20, (100.0,) * 5)  # 5 are its half of a second
    assert rounds == list(range(1, 21))
    assert calls[:4] == ["quick", "slow", "quick", "slow"]
    # One in every four rounds, whichever goes first.
    for start in range(4, len(calls), 5):
        assert sorted(calls[start : start + 5]) == ["quick"] * 4 + ["slow"]
    calls.clear()
    interleaved([run("quick", 1.0), run("slow", 1.0)], CPU, 20, 1.0)
    assert {tuple(calls[start : start + 2]) for start in range(4, 44, 2)} == {("quick", "slow"), ("slow", "quick")}


def test_the_slowest_is_measured_three_times(clock: None) -> None:
    (slow,) = interleaved([lambda: 60_000.0], CPU, 20, 1.0)
    assert len(slow.samples_ms) == 3


def test_quartiles() -> None:
    one = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (one.median_ms, one.quartiles_ms) == (3.0, (2.0, 4.0))


def test_real_time_is_taken() -> None:
    (one,) = interleaved([lambda: torch.ones(1000).sum()], CPU, 3, 1.0)
    assert all(sample > 0 for sample in one.samples_ms)


def test_time_on_a_gpu_is_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the order of the calls is what can be wrong."""
    log: list[str] = []

    class Event:
        def __init__(self, device: str, *, enable_timing: bool) -> None:
            assert (device, enable_timing) == ("cuda", True)

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait for the event")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 7.0

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait for the device"))
    (one,) = interleaved([lambda: log.append("run")], torch.device("cuda"), 3, 1.0)
    assert one.samples_ms == (7.0,) * 3
    assert log == ["wait for the device", "record", "run", "record", "wait for the event"] * 5


LARGE, SMALL = (64 << 20, 64), (4000 << 10, 1000)


@pytest.mark.parametrize(
    ("dtype", "size", "times", "reached"),
    [
        ("fp32", LARGE, {"read": 10, "sweep": 11.5, "torch_sequence": 35, "torch_sequence_amax": 115}, [True] * 3),
        ("fp32", LARGE, {"read": 10, "sweep": 11.6, "torch_sequence": 34, "torch_sequence_amax": 115}, [False] * 3),
        ("fp16", LARGE, {"read": 1, "sweep": 1, "torch_sequence": 8, "torch_sequence_amax": 19}, [True, True, False]),
        ("bf16", LARGE, {"read": 1, "sweep": 1, "torch_sequence": 49, "torch_sequence_amax": 100}, [True, False, True]),
        ("e4m3", LARGE, {"read": 10, "sweep": 15}, [True]),
        ("e5m2", LARGE, {"read": 10, "sweep": 16}, [False]),
        ("fp32", LARGE, {"sweep": 1, "torch_sequence": 3, "torch_sequence_amax": 10}, [True, True]),
        ("fp16", SMALL, {"read": 1, "sweep": 1, "torch_sequence": 3}, [True]),
        ("fp16", SMALL, {"read": 1, "sweep": 1, "torch_sequence": 2.9}, [False]),
        ("e4m3", SMALL, {"read": 1, "sweep": 1}, []),
        ("fp32", (64 << 10, 64), {"read": 1, "sweep": 9, "torch_sequence": 1}, []),
    ],
)
def test_targets_on_the_cpu(dtype: str, size: tuple[int, int], times: dict[str, float], reached: list[bool]) -> None:
    found = targets(CPU, dtype, *size, {key: took(ms) for key, ms in times.items()})
    assert [target.reached for target in found] == reached


@pytest.mark.parametrize(
    ("dtype", "copy", "sweep", "reached"),
    [("fp32", 18, 10, [True]), ("fp32", 17, 10, [False]), ("e5m2", 16, 10, [True]), ("e5m2", 15, 10, [False])],
)
def test_targets_on_a_gpu(dtype: str, copy: float, sweep: float, reached: list[bool]) -> None:
    found = targets(torch.device("cuda"), dtype, *LARGE, {"copy": took(copy), "sweep": took(sweep)})
    assert [target.reached for target in found] == reached


def test_the_table_shows_gaps_and_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "memory_growth", lambda *arguments: 1_500_000)
    options = bench.Options(numel=64, num_tensors=2, dtypes=("e4m3",), rounds=3)
    result = bench.measure(options, "e4m3")
    kept, missed = bench.Target("this", 2.0, at_most=3.0), bench.Target("that", 2.0, at_least=3.0)
    shown = io.StringIO()
    changed = {**vars(result), "targets": (kept, missed), "disturbed": True, "cores_of_others": 1.5}
    Console(file=shown, width=120).print(table(options, bench.Result(**changed)))
    text = shown.getvalue()
    assert re.search(r"clip multiply( +-){6} *\n", text)
    assert "A sweep takes 1.50 MB of memory beside 0.0 MB of gradients." in text
    assert "Other processes kept 1.50 cores busy meanwhile." in text
    assert "do not trust it" in text
    assert "Target reached: this = 2.00, is to be at most 3." in text
    assert "Target missed: that = 2.00, is to be at least 3." in text


def test_a_row_is_held_against_its_own_limit_and_rival() -> None:
    own = {"cast": {"limit": "read_fp32", "rival": "torch_cast"}}
    times = {"read": 1.0, "read_fp32": 4.0, "cast": 6.0, "torch_cast": 33.0, "torch_sequence": 1000.0}
    measured = []
    for key, ms in times.items():
        candidate = bench.Candidate(key, f"the {key}", "distscale", 1, lambda: None, **own.get(key, {}))
        measured.append(bench.Measured(candidate, took(ms)))
    shown = io.StringIO()
    options = bench.Options(numel=64, num_tensors=2, dtypes=("e4m3",), rounds=3)
    Console(file=shown, width=120).print(table(options, bench.Result("e4m3", 64, 0, None, False, tuple(measured), ())))
    row = re.search(r"the cast +6.00 .*", shown.getvalue())
    assert row is not None and row[0].split()[-2:] == ["1.50", "5.5x"]


def test_a_fault_of_ours_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench, "memory_growth", lambda *arguments: 0)
    monkeypatch.setattr("distscale.bench.candidate.scale_", fail)
    with pytest.raises(RuntimeError, match="broken"):
        bench.measure(bench.Options(numel=64, num_tensors=2, rounds=3), "fp32")


def test_a_sweep_takes_no_memory_that_grows() -> None:
    """C33: 128 MiB of gradients, and a few MiB for the chunks of the reference, were it in use."""
    assert 0 <= memory.memory_growth("fp32", 32 << 20, 3, CPU, 1) < 8 << 20


def test_memory_is_seen_when_it_is_taken() -> None:
    torch.ones(16 << 20)  # an earlier, higher peak is not to hide the next one,
    blocks = [torch.ones(4 << 10) for _ in range(4 << 10)]
    del blocks  # nor are 64 MiB of the heap that are free
    before = memory._peak(CPU, reset=True)
    torch.ones(8 << 20)
    assert memory._peak(CPU) - before > 31 << 20


def test_a_failure_while_measuring_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="the process that measures memory ended with 1"):
        memory.memory_growth("fp32", 8, 1, CPU, 1)


def test_other_work_is_told_apart_from_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    per_second = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "_STAT", stat)
    now = {"monotonic": 10.0, "process_time": 1.0}
    monkeypatch.setattr(machine, "time", SimpleNamespace(**{key: lambda key=key: now[key] for key in now}))

    def spend(user: int, idle: int) -> None:
        stat.write_text(f"cpu  {user * per_second} 0 0 {idle * per_second} 0 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")

    spend(user=100, idle=7)
    others = machine.OtherWork()
    spend(user=107, idle=20)
    now.update(monotonic=14.0, process_time=4.0)
    assert others.cores() == 1.0  # 7 s in 4 s, 3 of them our own
    stat.unlink()
    assert others.cores() is None


@pytest.mark.parametrize(("cores", "disturbed"), [(None, False), (0.05, False), (0.2, True)])
def test_a_disturbed_measurement_is_recognized(
    monkeypatch: pytest.MonkeyPatch, cores: float | None, disturbed: bool
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # which the tests' one thread needs
    assert bench._is_disturbed(CPU, cores) is disturbed


def test_the_commit_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = machine.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", found)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.commit() is None
