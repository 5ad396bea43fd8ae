"""Four ranks, as threads, against the oracle: every call that a program can make, in any order that it may come in.

DISTSCALE_EXAMPLES multiplies the number of programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random

import programs
import pytest
from calls import NUM_RANKS, Op
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from oracle import Oracle
from player import Player, check_all

from ranks import ThreadRanks

EXAMPLES = int(os.environ.get("DISTSCALE_EXAMPLES", "1"))

# A restart may bring back another rule than the constructor's, which the scaler rightly mentions.
pytestmark = pytest.mark.filterwarnings("ignore:the loaded scaler state changes:UserWarning")

RANDOM = st.randoms(use_true_random=False)


class FourRanks(RuleBasedStateMachine):
    """Each rule is one call on all ranks; after each, every rank is compared with the oracle, bit for bit."""

    @initialize(rng=RANDOM)
    def start(self, rng: Random) -> None:
        world = programs.random_world(rng)
        note(repr(world))
        self.oracle = Oracle(world)
        self.ranks = ThreadRanks(NUM_RANKS)
        self.players = [Player(world, reducer) for reducer in self.ranks.reducers]

    @rule(rng=RANDOM)
    def step_as_usual(self, rng: Random) -> None:
        for make in (programs.make_backward, programs.make_step, programs.make_update):
            self.make(make, rng)

    @rule(rng=RANDOM)
    def backward(self, rng: Random) -> None:
        self.make(programs.make_backward, rng)

    @rule(rng=RANDOM)
    def unscale(self, rng: Random) -> None:
        self.make(programs.make_unscale, rng)

    @rule(rng=RANDOM)
    def step(self, rng: Random) -> None:
        self.make(programs.make_step, rng)

    @precondition(lambda self: self.oracle.decisions)
    @rule(rng=RANDOM)
    def update(self, rng: Random) -> None:
        self.make(programs.make_update, rng)

    @rule(rng=RANDOM)
    def aside(self, rng: Random) -> None:
        self.make(programs.make_aside, rng)

    @rule(rng=RANDOM)
    def restart(self, rng: Random) -> None:
        self.make(programs.make_restart, rng)

    @rule(rng=RANDOM)
    def misuse(self, rng: Random) -> None:
        self.make(programs.make_misuse, rng)

    def make(self, maker: Callable[[Random, Oracle], Op | None], rng: Random) -> None:
        op = maker(rng, self.oracle)
        if op is None:
            return
        note(repr(op))
        expected = self.oracle.play(op)
        seen = self.ranks.run(lambda reducer: self.players[reducer.rank].play(op))
        check_all(self.oracle, expected, seen)


@pytest.mark.timeout(120 * EXAMPLES)
def test_four_ranks_follow_the_oracle() -> None:
    run_state_machine_as_test(
        FourRanks,
        settings=settings(settings.default, max_examples=60 * EXAMPLES, stateful_step_count=25),
    )
