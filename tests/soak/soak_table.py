"""The same episodes with distscale and with torch's scaler, as a table: ``make soak-torch``.

Torch's is ``torch.amp.GradScaler``, and ``ShardedGradScaler`` under FSDP1, called as its documentation says. Only
faults that come about by themselves are drawn; an episode ends with the first thing that goes wrong.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass, field

from soak_episodes import Episode, draw_episodes
from soak_layouts import LAYOUTS
from soak_world import World, look

EPISODE_STEPS = 25
SCALERS = {"distscale": 60.0, "torch": 15.0}
"""And the timeout of the process group: where torch's scaler leaves ranks waiting for each other, it is waited for."""


@dataclass
class Tally:
    steps: int = 0
    faults: int = 0
    """Steps that had to be skipped."""
    split: int = 0
    poisoned: int = 0
    false_skips: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, world: World, episode: Episode) -> None:
        by_rank = world.play(episode)
        for rows in zip(*by_rank, strict=False):
            seen = look(rows)
            self.steps += 1
            self.faults += seen.must_skip
            self.split += seen.is_split
            self.poisoned += seen.is_poisoned
            self.false_skips += not seen.must_skip and not seen.error and not any(row.params_changed for row in rows)
            if seen.error:
                self.errors.append(seen.error)
            if not seen.is_good:
                return

    def cells(self) -> list[int]:
        return [self.steps, self.faults, self.split, self.poisoned, len(self.errors)]


def play_all(num_steps: int) -> dict[str, dict[str, Tally]]:
    num_episodes = math.ceil(num_steps / len(LAYOUTS) / EPISODE_STEPS)
    episodes = {layout: draw_episodes(layout, num_episodes, EPISODE_STEPS, wild=False) for layout in LAYOUTS}
    tallies: dict[str, dict[str, Tally]] = {}
    for scaler, timeout_s in SCALERS.items():
        tallies[scaler] = {}
        with World(scaler, 4, timeout_s) as four, World(scaler, 8, timeout_s) as eight:
            for layout, kind in LAYOUTS.items():
                tally = tallies[scaler][layout] = Tally()
                for episode in episodes[layout]:
                    tally.add(eight if kind.num_ranks == 8 else four, episode)
                print(f"{scaler} on {layout}: {tally.cells()}", file=sys.stderr, flush=True)
    return tallies


def table(tallies: dict[str, dict[str, Tally]]) -> list[str]:
    names = ["steps", "to skip", "split", "poisoned", "errors"]
    head = ["layout", *(f"{scaler}: {name}" for scaler in tallies for name in names)]
    lines = [head, ["---"] * len(head)]
    for layout in LAYOUTS:
        lines.append([layout, *(str(cell) for by_layout in tallies.values() for cell in by_layout[layout].cells())])
    sums = [
        sum(column)
        for by_layout in tallies.values()
        for column in zip(*(tally.cells() for tally in by_layout.values()), strict=True)
    ]
    lines.append(["all", *map(str, sums)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def main() -> int:
    logging.disable(logging.WARNING)
    tallies = play_all(int(os.environ.get("DISTSCALE_SOAK_STEPS", "2000")))
    print("\n".join(table(tallies)))
    for scaler, by_layout in tallies.items():
        for layout, tally in by_layout.items():
            kinds = {error.strip().splitlines()[-1] for error in tally.errors}
            print(*(f"{scaler} on {layout}: {kind}" for kind in sorted(kinds)), sep="\n", end="\n" if kinds else "")
            if tally.false_skips:
                print(f"{scaler} on {layout}: {tally.false_skips} good steps skipped on all ranks")
    return int(any(tally.split or tally.poisoned or tally.errors for tally in tallies["distscale"].values()))


if __name__ == "__main__":
    sys.exit(main())
