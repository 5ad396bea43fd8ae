"""The random programs once more, on processes that talk through gloo: nothing is shared, nothing is simulated."""

from __future__ import annotations

import os
import pickle
import warnings

import pytest
from calls import NUM_RANKS
from oracle import Oracle
from player import Player, Seen, check_all
from programs import random_program

from distscale import ProcessGroupReducer
from ranks import run_ranks

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))
NUM_PROGRAMS = 60 * EXAMPLES
NUM_CALLS = 30


def _play_all(rank: int, first_seed: int, num_programs: int) -> list[list[bytes]]:
    """By program and call: what this rank saw, pickled."""
    warnings.filterwarnings("ignore", "the loaded scaler state changes")
    reducer = ProcessGroupReducer()
    assert reducer.rank == rank
    seen = []
    for seed in range(first_seed, first_seed + num_programs):
        world, ops = random_program(seed, NUM_CALLS)
        player = Player(world, reducer)
        seen.append([pickle.dumps(player.play(op)) for op in ops])
    return seen


@pytest.mark.timeout(120 * EXAMPLES)
def test_four_processes_follow_the_oracle() -> None:
    first_seed = 10_000
    by_rank = run_ranks(_play_all, NUM_RANKS, first_seed, NUM_PROGRAMS, timeout_s=100.0 * EXAMPLES)
    num_skipped = num_applied = 0
    for index in range(NUM_PROGRAMS):
        world, ops = random_program(first_seed + index, NUM_CALLS)
        oracle = Oracle(world)
        for number, op in enumerate(ops):
            expected = oracle.play(op)
            seen: list[Seen] = [pickle.loads(by_rank[rank][index][number]) for rank in range(NUM_RANKS)]
            try:
                check_all(oracle, expected, seen)
            except AssertionError as error:
                raise AssertionError(f"seed {first_seed + index}, call {number}, {op}: {error}") from None
            num_skipped += sum(report.skipped for report in expected.reports)
            num_applied += sum(not report.skipped for report in expected.reports)
    # Programs that only ever skip, or never do, would prove little.
    assert min(num_skipped, num_applied) > 2 * NUM_PROGRAMS
