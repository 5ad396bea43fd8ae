"""A rank whose state has drifted from its peers' is found at the next step, before anything is applied."""

from __future__ import annotations

import os
from random import Random

import pytest
from calls import NUM_RANKS, Backward, Op, Step, Update, World
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from player import Player, Seen
from programs import random_world

from ranks import ThreadRanks

FIELDS = ("scale", "_growth_tracker", "hysteresis_tracker", "blocked_steps", "step")


def _clean_step(world: World) -> list[Op]:
    grads = {
        (rank, spec.name): (2.0**-4,) * numel
        for spec in world.tensors
        for rank, numel in enumerate(spec.numels)
        if numel is not None
    }
    return [Backward(grads), Step(tuple(range(len(world.optimizers)))), Update()]


def _drift(player: Player, field: str) -> None:
    saved = player.scaler.state_dict()
    if field == "scale":
        saved[field] = saved[field] / 2 if saved[field] > player.world.min_scale else saved[field] * 2
    elif field == "hysteresis_tracker":
        saved[field] += 1 if saved[field] < player.scaler._policy.hysteresis else -1
    else:
        saved[field] += 1
    player.scaler.load_state_dict(saved)


@settings(max_examples=30 * int(os.environ.get("DISTSCALE_EXAMPLES", "1")))
@given(
    seed=st.integers(0, 2**32),
    num_before=st.integers(0, 3),
    drifted=st.integers(0, NUM_RANKS - 1),
    field=st.sampled_from(FIELDS),
)
@pytest.mark.filterwarnings("ignore:the loaded scaler state changes:UserWarning")
def test_a_rank_that_drifts_is_found(seed: int, num_before: int, drifted: int, field: str) -> None:
    world = random_world(Random(seed))
    if field == "scale" and world.policy == "none":
        field = "step"  # it has no other scale
    ranks = ThreadRanks(NUM_RANKS)
    players = [Player(world, reducer) for reducer in ranks.reducers]

    def play(op: Op) -> list[Seen]:
        return ranks.run(lambda reducer: players[reducer.rank].play(op))

    before: list[Seen] = []
    for op in _clean_step(world) * num_before:
        before = play(op)
        # Some worlds have a scale at which even these gradients overflow, step after step.
        assume([seen.error for seen in before] != ["ScaleExhaustedError"] * NUM_RANKS)
        assert [seen.error for seen in before] == [None] * NUM_RANKS
    _drift(players[drifted], field)
    backward, step, _ = _clean_step(world)
    play(backward)
    # Ranks that step on the device learn of it when they ask for the report, the others in the step itself.
    after = play(step)
    assert [seen.error for seen in after] == ["DesyncError"] * NUM_RANKS
    for rank, seen in enumerate(after):
        for name, (parameter, _, momentum) in seen.tensors.items():
            if before:
                assert (parameter, momentum) == (before[rank].tensors[name][0], before[rank].tensors[name][2])
            else:
                assert not any(parameter)
                assert momentum is None
