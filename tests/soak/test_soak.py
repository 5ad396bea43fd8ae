"""The whole on every layout: random episodes of steps with random faults; the ranks must never come apart.

CI plays about 300 steps. ``make soak`` plays 10,000, other ones each time; DISTSCALE_SOAK_STEPS sets the number.
"""

from __future__ import annotations

import math
import os
import random
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from soak_episodes import Episode, Fault, episodes
from soak_layouts import LAYOUTS
from soak_world import World, check

NUM_STEPS = int(os.environ.get("DISTSCALE_SOAK_STEPS", "300"))
IS_SOAK = "DISTSCALE_SOAK_STEPS" in os.environ
# Eight ranks take too long for CI.
PLAYED = [layout for layout, kind in LAYOUTS.items() if IS_SOAK or kind.num_ranks == 4]
# The first episode that is drawn is the simplest, without faults.
EPISODE_STEPS = 25 if NUM_STEPS >= 4000 else 5
NUM_EPISODES = math.ceil(NUM_STEPS / len(PLAYED) / EPISODE_STEPS)

KNOWN = Episode(
    "fsdp2 x tp, norms first",
    "adamw-loop",
    0.05,
    False,
    2,
    1024.0,
    3,
    0,
    ((), (Fault("gradient", 1, 2),), (Fault("loss", 2, 0, "nan"), Fault("veto", 0)), (), ()),
)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """By the number of ranks."""
    with World("distscale", 4) as four, World("distscale", 8) as eight:
        yield {4: four, 8: eight}


@pytest.mark.timeout(120 + NUM_STEPS)
@pytest.mark.parametrize("layout", PLAYED)
def test_no_rank_is_ever_apart(worlds: dict[int, World], layout: str) -> None:
    num_steps = 0

    @seed(random.getrandbits(64) if IS_SOAK else zlib.crc32(layout.encode()))
    @settings(
        settings.default,
        max_examples=NUM_EPISODES,
        derandomize=False,
        database=None,
        phases=[Phase.generate, Phase.shrink],  # to explain a failure takes minutes, and explains nothing
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def play(data: st.DataObject) -> None:
        nonlocal num_steps
        episode = data.draw(episodes(layout, EPISODE_STEPS, wild=True))
        check(episode, worlds[episode.kind.num_ranks].play(episode))
        num_steps += EPISODE_STEPS

    play()
    assert num_steps >= NUM_STEPS / len(PLAYED)


def test_replay(worlds: dict[int, World]) -> None:
    """An episode from DISTSCALE_SOAK_EPISODE, as a failure prints it; else one that is written down here."""
    text = os.environ.get("DISTSCALE_SOAK_EPISODE", KNOWN.to_json())
    episode = Episode.from_json(text)
    check(episode, worlds[episode.kind.num_ranks].play(episode))
