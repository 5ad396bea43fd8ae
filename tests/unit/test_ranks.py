"""The helpers that start many ranks: they must not hide a failure, hang, or leave a process behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distscale.errors import ProtocolError
from distscale.reducers import LocalReducer, ProcessGroupReducer, Reducer
from ranks import CountingReducer, RanksError, ThreadRanks, ThreadReducer, run_ranks, run_threads

# What a rank does. At module level, where every process finds it.


def report(rank: int, shared: torch.Tensor, maxima: list[list[int]], sums: list[list[float]]) -> dict[str, Any]:
    shared += rank  # a copy of its own, so no rank sees another's addition
    return {
        "rank": rank,
        "environment": (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]),
        "backend": dist.get_backend(),
        "shared": shared,
        "threads": torch.get_num_threads(),
        "hash": hash("as on ranks that are started apart"),
        "pid": os.getpid(),
        "reduced": reduce_and_gather(ProcessGroupReducer(), maxima, sums),
    }


def reduce_and_gather(reducer: Reducer, maxima: list[list[int]], sums: list[list[float]]) -> tuple[Any, ...]:
    high = torch.tensor(maxima[reducer.rank], dtype=torch.int32)
    total = torch.tensor(sums[reducer.rank], dtype=torch.float64)
    alone = torch.tensor([reducer.rank], dtype=torch.int32)
    reducer.reduce_(high, total)
    reducer.reduce_(alone, None)
    return high.tolist(), alone.tolist(), reducer.gather({"from": reducer.rank}), total.tolist()


def fail_in_many_ways(rank: int) -> object:
    if rank == 1:
        raise ValueError("the trouble of rank 1")
    if rank == 2:
        raise SystemExit(0)
    return threading.Lock() if rank == 3 else f"has a group: {dist.is_initialized()}"


def die_in_many_ways(rank: int) -> str:
    if rank == 1:
        os._exit(7)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.zeros(()))
    except RuntimeError:
        return "saw a peer go"
    return "saw nothing"


def hang_in_many_ways(rank: int, pipes: Path) -> str:
    """Ranks 1 and 2 hang; rank 0 waits until they are about to, and fails."""
    if rank == 0:
        pids = [int((pipes / str(peer)).read_text()) for peer in (1, 2)]
        raise ValueError(f"the peers are {pids}")
    (pipes / str(rank)).write_text(str(os.getpid()))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_ever()
    return "never"


def wait_for_ever() -> None:
    threading.Event().wait()


# Processes.


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_results_come_by_rank_and_threads_agree_with_processes() -> None:
    maxima = [[3, -5, 2**31 - 1], [7, -9, 0], [1, -(2**31), 4]]
    sums = [[0.1, 1e300], [0.2, 1.0], [0.3, -1e300]]
    reports = run_ranks(report, 3, torch.zeros(2), maxima, sums)
    for rank, told in enumerate(reports):
        assert told["rank"] == rank
        assert told["environment"] == (str(rank), str(rank), "3")
        assert told["backend"] == "gloo"
        assert told["shared"].tolist() == [rank, rank]
        assert told["threads"] == 1
        assert is_gone(told["pid"])
    assert reports[0]["hash"] != reports[1]["hash"]
    assert not multiprocessing.active_children()
    assert "RANK" not in os.environ

    threads = run_threads(reduce_and_gather, 3, maxima, sums)
    everyone = [{"from": 0}, {"from": 1}, {"from": 2}]
    # The sum goes in rank order: the 1.0 is lost beside 1e300. A process group may add in another order.
    assert threads == [([7, -5, 2**31 - 1], [2], everyone, [0.1 + 0.2 + 0.3, 0.0])] * 3
    assert [told["reduced"][:3] for told in reports] == [reduced[:3] for reduced in threads]


def test_every_failed_rank_shows_its_traceback() -> None:
    with pytest.raises(RanksError, match="fail_in_many_ways: 3 of 4 ranks failed") as caught:
        run_ranks(fail_in_many_ways, 4, init=False)
    assert caught.value.results == {0: "has a group: False"}
    assert sorted(caught.value.failures) == [1, 2, 3]
    assert "in fail_in_many_ways" in caught.value.failures[1]
    assert "ValueError: the trouble of rank 1" in caught.value.failures[1]
    assert "SystemExit: 0" in caught.value.failures[2]
    assert "cannot pickle" in caught.value.failures[3]
    assert all(text.rstrip() in str(caught.value) for text in caught.value.failures.values())


def test_dead_ranks_are_reported_and_their_peer_heard() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(die_in_many_ways, 3)
    assert caught.value.results == {0: "saw a peer go"}
    assert "exit code 7" in caught.value.failures[1]
    assert "exit code -9 (SIGKILL)" in caught.value.failures[2]


def test_hung_ranks_are_ended_after_a_failure_and_say_where_they_were(tmp_path: Path) -> None:
    for peer in ("1", "2"):
        os.mkfifo(tmp_path / peer)
    # timeout_s is far above pytest's own limit for a test, so only the grace after a failure can end this.
    with pytest.raises(RanksError) as caught:
        run_ranks(hang_in_many_ways, 3, tmp_path, init=False, timeout_s=3600.0, group_timeout_s=0.5)
    assert "ValueError: the peers are" in caught.value.failures[0]
    assert "was killed" in caught.value.failures[1]
    assert "in wait_for_ever" in caught.value.failures[1]
    assert "in hang_in_many_ways" in caught.value.failures[1]
    assert "no stack" in caught.value.failures[2]
    pids = re.search(r"the peers are \[(\d+), (\d+)\]", caught.value.failures[0])
    assert pids is not None
    assert all(is_gone(int(pid)) for pid in pids.groups())
    assert not multiprocessing.active_children()


def test_the_time_limit_ends_a_rank() -> None:
    with pytest.raises(RanksError, match="still ran at the end of the time and was killed"):
        run_ranks(wait_with_rank, 1, init=False, timeout_s=0.5)
    assert not multiprocessing.active_children()


def wait_with_rank(rank: int) -> None:
    wait_for_ever()


# Threads.


def fail_on_thread_2(reducer: ThreadReducer) -> None:
    if reducer.rank == 2:
        raise ValueError("the trouble of rank 2")
    reducer.gather("ready")


def return_early_on_thread_0(reducer: ThreadReducer) -> int:
    for _ in range(reducer.rank + 1):
        reducer.gather("ready")
    return reducer.rank


def come_for_different_things(reducer: ThreadReducer) -> None:
    reducer.reduce_(torch.zeros(3 + reducer.rank, dtype=torch.int32), None)


def change_what_was_gathered(reducer: ThreadReducer) -> list[list[int]]:
    gathered: list[list[int]] = reducer.gather([reducer.rank])
    gathered[0].append(99)
    reducer.gather(None)
    return gathered


def reduce_many(reducer: ThreadReducer, num_rounds: int) -> list[int]:
    found = []
    for turn in range(num_rounds):
        maxima = torch.tensor([turn * 10 + reducer.rank], dtype=torch.int32)
        reducer.reduce_(maxima, None)
        found.append(int(maxima))
    return found


def wait_on_thread_1(reducer: ThreadReducer, end: threading.Event) -> None:
    if reducer.rank == 1:
        end.wait()
    else:
        reducer.gather("ready")


def test_a_failed_thread_ends_its_peers_and_the_world_lives_on() -> None:
    world = ThreadRanks(3)
    with pytest.raises(RanksError) as caught:
        world.run(fail_on_thread_2)
    assert "ValueError: the trouble of rank 2" in caught.value.failures[2]
    for rank in (0, 1):
        assert f"rank {rank} is alone in its exchange" in caught.value.failures[rank]
        assert "rank 2 failed with ValueError" in caught.value.failures[rank]
    assert world.run(reduce_many, 50) == [[turn * 10 + 2 for turn in range(50)]] * 3


def test_a_thread_that_returned_leaves_its_peers_no_wait() -> None:
    with pytest.raises(RanksError) as caught:
        run_threads(return_early_on_thread_0, 2)
    assert caught.value.results == {0: 0}
    assert "rank 0 has returned" in caught.value.failures[1]


def test_threads_that_came_for_different_things() -> None:
    with pytest.raises(RanksError, match="different exchanges") as caught:
        run_threads(come_for_different_things, 2)
    assert sorted(caught.value.failures) == [0, 1]


def test_gathered_items_are_copies() -> None:
    assert run_threads(change_what_was_gathered, 2) == [[[0, 99], [1]]] * 2


def test_a_hung_thread_is_reported_with_its_stack() -> None:
    end = threading.Event()
    with pytest.raises(RanksError) as caught:
        run_threads(wait_on_thread_1, 2, end, timeout_s=0.5)
    end.set()
    assert "wait_on_thread_1" in caught.value.failures[1]
    assert "end.wait()" in caught.value.failures[1]
    assert 0 in caught.value.failures


# Counting.


def test_the_counting_reducer_counts_and_passes_on() -> None:
    counting = CountingReducer(LocalReducer())
    counting.reduce_(torch.zeros(5, dtype=torch.int32), torch.zeros(2, dtype=torch.float64))
    counting.reduce_(torch.zeros(5, dtype=torch.int32), None)
    assert counting.gather("item") == ["item"]
    assert (counting.rank, counting.world_size) == (0, 1)
    assert counting.device(torch.device("cpu")) == torch.device("cpu")
    assert counting.reduced_bytes == [36, 20]
    assert (counting.num_reduces, counting.num_gathers) == (2, 1)


def test_the_counting_reducer_passes_on_errors() -> None:
    def leave_rank_0_alone(reducer: ThreadReducer) -> None:
        if reducer.rank == 0:
            counting = CountingReducer(reducer)
            with pytest.raises(ProtocolError, match="alone in its exchange"):
                counting.reduce_(torch.zeros(1, dtype=torch.int32), None)
            assert counting.num_reduces == 1

    run_threads(leave_rank_0_alone, 2)
