"""Many ranks in one test: as processes (the truth) or as threads (for volume, see ``rank_threads``).

    def sums(rank: int, start: int) -> int:          # at module level, so that every process finds it
        value = torch.tensor(start + rank)
        dist.all_reduce(value)
        return int(value)

    def test_sums() -> None:
        assert run_ranks(sums, 2, 10) == [21, 21]

The processes are forked from servers that have imported torch and nothing has run in. A start still costs a good part
of a second: let one call run many cases.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from rank_threads import CountingReducer, RanksError, ThreadRanks, ThreadReducer, run_threads

__all__ = ["CountingReducer", "RanksError", "ThreadRanks", "ThreadReducer", "run_ranks", "run_threads"]

_STACK_SIGNAL = signal.SIGUSR2  # SIGUSR1 is left to tests of preemption
_STACK_WAIT_S = 2.0
_ORPHAN_S = 30.0

_context = multiprocessing.get_context("forkserver")
# One of the even ranks and one of the odd: a string has another hash in each, and so a set another order, as on ranks
# that a launcher starts.
_servers = ForkServer(), ForkServer()
# What most ranks import anyway, seconds of it. Nothing that starts a thread, reads the environment or looks for a GPU.
_PRELOADED = ["pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
for _server in _servers:
    _server.set_forkserver_preload(_PRELOADED)


@dataclass(frozen=True)
class _Job:
    """What a rank needs to know; travels to it as an argument of the process."""

    call: bytes  # pickled (fn, args): torch's own pickler would put tensors into memory that all ranks share
    environment: Mapping[str, str]  # the caller's: that of the server is of the time of its start
    rank: int
    world_size: int
    folder: Path
    backend: str | None
    group_timeout_s: float
    timeout_s: float
    take_down: bool

    def file(self, kind: Literal["outcome", "stack"]) -> Path:
        return self.folder / f"{kind}-{self.rank}"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
    group_timeout_s: float = 20.0,
    take_down: bool = True,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` in ``world_size`` processes and returns what they return, by rank.

    Each process uses one torch thread and has RANK, LOCAL_RANK and WORLD_SIZE in its environment. Arguments and
    results are pickled: a rank gets a copy of its own. What a rank prints appears in the output of the test.

    Args:
        fn: a function at the top level of a module that can be imported, the test's own for instance.
        timeout_s: for the whole call. When it has passed, the ranks that still run are killed.
        backend: of the default process group; with NCCL, rank r uses device r.
        init: False to start the processes without a process group.
        group_timeout_s: of the process group's collectives. When a rank fails, the others get 5 s more than this to
            come to an end.
        take_down: False to end the processes at once, after a barrier: libraries that keep process groups of their own
            (DeepSpeed) are not taken down with the default one.

    Raises:
        RanksError: if any rank raised, died or ran out of time. It has the traceback, the exit code or the stack of
            each such rank (``failures``) and what the others returned (``results``).
    """
    deadline = time.monotonic() + timeout_s
    call = pickle.dumps((fn, args))
    environment, group = dict(os.environ), backend if init else None
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [
            _Job(call, environment, rank, world_size, Path(folder), group, group_timeout_s, timeout_s, take_down)
            for rank in range(world_size)
        ]
        processes = [_context.Process(target=_rank_main, args=(job,), daemon=True) for job in jobs]
        late: dict[int, str] = {}
        try:
            for rank, process in enumerate(processes):
                _start(process, rank)
            if not _wait_for_all(processes, deadline, group_timeout_s + 5.0):
                late = _stacks(jobs, processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
        return _results(fn, jobs, [process.exitcode for process in processes], late)


def _start(process: ForkServerProcess, rank: int) -> None:
    with patch.dict(os.environ):
        for seed, server in enumerate(_servers):
            os.environ["PYTHONHASHSEED"] = str(seed)
            server.ensure_running()
    # multiprocessing itself knows of one server alone.
    with patch.object(forkserver, "connect_to_new_process", _servers[rank % 2].connect_to_new_process):
        process.start()


def _wait_for_all(processes: Sequence[ForkServerProcess], deadline: float, grace_s: float) -> bool:
    """Returns whether all have ended by the deadline, or by ``grace_s`` after the first failure."""
    running = {process.sentinel: process for process in processes}
    has_failed = False
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return False
        for sentinel in ended:
            assert isinstance(sentinel, int)
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0 and not has_failed:
                has_failed = True
                deadline = min(deadline, time.monotonic() + grace_s)
    return True


def _stacks(jobs: Sequence[_Job], processes: Sequence[ForkServerProcess]) -> dict[int, str]:
    """Asks every rank that still runs where it is, and kills it."""
    late = {job.rank: process for job, process in zip(jobs, processes, strict=True) if process.is_alive()}
    for rank, process in late.items():
        # Before its first line is there the rank has no handler yet, and the signal would end it.
        if process.pid is not None and _read(jobs[rank].file("stack")):
            os.kill(process.pid, _STACK_SIGNAL)
    until = time.monotonic() + _STACK_WAIT_S
    stacks = {}
    for rank, process in late.items():
        stacks[rank] = _read_when_whole(jobs[rank].file("stack"), process, until)
        process.kill()
        process.join()
    return stacks


def _read_when_whole(stack: Path, process: ForkServerProcess, until: float) -> str:
    """Returns what the rank wrote about where it is; empty if it did not answer: it may be stopped."""
    text, before = _read(stack), ""
    # A text that still grows is not whole.
    while text and ("thread" not in text or text != before) and process.is_alive() and time.monotonic() < until:
        process.join(0.05)
        text, before = _read(stack), text
    return text if "thread" in text else ""


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _results(
    fn: Callable[..., Any], jobs: Sequence[_Job], exit_codes: Sequence[int | None], late: Mapping[int, str]
) -> list[Any]:
    """Returns the results by rank, or raises for all ranks that have none."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    for job, exit_code in zip(jobs, exit_codes, strict=True):
        kind, value = _load(job.file("outcome"))
        if kind == "raised":
            failures[job.rank] = value
        elif job.rank in late:
            stack = late[job.rank] or "no stack: it was still starting, or stopped"
            failures[job.rank] = f"still ran at the end of the time and was killed; {stack}"
        elif kind == "returned" and exit_code == 0:
            results[job.rank] = value
        elif kind == "returned":
            failures[job.rank] = f"returned, but died while its group was taken down: {_describe_exit(exit_code)}"
        else:
            failures[job.rank] = f"died without a result: {_describe_exit(exit_code)}"
    if failures:
        raise RanksError(fn, failures, results)
    return [results[job.rank] for job in jobs]


def _load(outcome: Path) -> tuple[str, Any]:
    if not outcome.exists():
        return "nothing", None
    kind, value = pickle.loads(outcome.read_bytes())
    return kind, value


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"exit code {exit_code} ({signal.Signals(-exit_code).name})"
    return f"exit code {exit_code}"


def _rank_main(job: _Job) -> None:
    """The life of one rank: set-up, the function, the outcome in a file."""
    os.environ.clear()
    os.environ.update(job.environment)
    with job.file("stack").open("w") as stack:
        faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=True)
        print("where it was, the innermost call first:", file=stack, flush=True)
        # If the parent is killed no orphan stays, not even one that holds Python's lock.
        threading.Thread(target=_end_with_parent, daemon=True).start()
        faulthandler.dump_traceback_later(job.timeout_s + _ORPHAN_S, exit=True, file=sys.__stderr__ or 2)
        try:
            outcome = pickle.dumps(("returned", _call(job)))
        except BaseException:  # SystemExit too: a rank that calls sys.exit() has failed
            _write_whole(job.file("outcome"), pickle.dumps(("raised", traceback.format_exc())))
            # The group is as it is now; taking it down could hang. The peers see the connection close.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        _write_whole(job.file("outcome"), outcome)
        if not job.take_down:
            dist.barrier()
        elif dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(_STACK_SIGNAL)
        sys.stdout.flush()
        sys.stderr.flush()
        # At the end of the interpreter, gloo's threads of groups that something still holds now and then abort it.
        os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_whole(file: Path, content: bytes) -> None:
    """A rank that is killed while it writes leaves no half outcome."""
    draft = file.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(file)


def _call(job: _Job) -> Any:
    fn, args = pickle.loads(job.call)
    torch.set_num_threads(1)
    rank = str(job.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(job.world_size))
    if job.backend is not None:
        if "nccl" in job.backend:
            torch.cuda.set_device(job.rank)
        if any(name == "lo" for _, name in socket.if_nameindex()):
            # gloo would look up the host's name, which not every machine can.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            job.backend,
            init_method=f"file://{job.folder / 'store'}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.group_timeout_s),
        )
    return fn(job.rank, *args)
