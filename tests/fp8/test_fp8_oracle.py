"""Random trainings on several ranks, restarts on other numbers of ranks among them, beside an oracle without torch."""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from distscale import DistributedGradScaler
from distscale.fp8 import DelayedScaling, Fp8Scales
from distscale.fp8.meter import Metered
from distscale.fp8.scales import bits_of_amax
from ranks import ThreadRanks

FLOAT32_MAX = 3.4028234663852886e38
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
TENSORS = (
    Metered("input", False),
    Metered("weight", False),
    Metered("grad_output", True),
    Metered("sent", True, is_sent=True),
)
amaxes = st.sampled_from([0.0, math.inf, math.nan, 1e-45, 1e-39, 3.4e38]) | st.floats(0.0, 1e6, width=32)


@dataclass(frozen=True)
class Step:
    seen: Sequence[tuple[int, str, float]]
    """Rank (modulo the number there is), tensor, amax of a micro-batch."""
    overflows: bool
    restarts_on: int
    """Ranks after this step, in a new process; 0: no restart."""


steps = st.builds(
    Step,
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([tensor.name for tensor in TENSORS]), amaxes), max_size=6),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1, 2, 3]),
)
recipes = st.builds(
    DelayedScaling,
    st.sampled_from(["E4M3", "E5M2", "HYBRID"]),
    st.integers(0, 2),
    st.just(True),
    st.integers(1, 4),
    st.sampled_from(["max", "most_recent"]),
)


def fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass
class Oracle:
    recipe: DelayedScaling
    loss_scale: float
    histories: dict[str, list[float]] = field(default_factory=dict)

    def step(self, step: Step) -> None:
        largest: dict[str, float] = defaultdict(float)
        bad = set()
        for _, name, seen in step.seen:
            amax = fp32(seen)
            if math.isfinite(amax):
                largest[name] = max(largest[name], amax)
            else:
                bad.add(name)
        skipped = step.overflows or "sent" in bad
        for tensor in TENSORS:
            amax = largest[tensor.name]
            if tensor.name in bad or amax == 0 or (tensor.is_gradient and skipped):
                continue
            if tensor.is_gradient:
                amax = fp32(min(amax / self.loss_scale, FLOAT32_MAX))
            if amax:
                history = [amax, *self.histories.get(tensor.name, [])]
                self.histories[tensor.name] = history[: self.recipe.amax_history_len]
        self.loss_scale *= 0.5 if skipped else 2.0

    def scales(self) -> dict[str, float]:
        return {tensor.name: self._scale(tensor) for tensor in TENSORS}

    def _scale(self, tensor: Metered) -> float:
        history = self.histories.get(tensor.name)
        if not history:
            return 0.0
        amax = history[0] if self.recipe.amax_compute_algo == "most_recent" else max(history)
        if tensor.is_gradient:
            amax = fp32(min(amax * self.loss_scale, FLOAT32_MAX))
        if not amax:
            return 0.0
        is_wide = self.recipe.fp8_format == "E5M2" or (
            self.recipe.fp8_format == "HYBRID" and tensor.name == "grad_output"
        )
        exponent = math.frexp(LARGEST["E5M2" if is_wide else "E4M3"] / 2**self.recipe.margin / amax)[1] - 1
        return 2.0 ** max(-126, min(126, exponent))


def tensors_of(rank: int, world_size: int) -> dict[str, Metered]:
    """Rank 0 has all; each of the others has some of them, too."""
    return {tensor.name: tensor for place, tensor in enumerate(TENSORS) if rank == 0 or place % world_size == rank}


class Rank:
    def __init__(self, reducer: Any, recipe: DelayedScaling) -> None:
        self.rank, self.world_size = reducer.rank, reducer.world_size
        scales = Fp8Scales(recipe)
        held = tensors_of(self.rank, self.world_size)
        self.meter = scales.meter(list(held.values()))
        self.place = {name: index for index, name in enumerate(held)}
        self.param = nn.Parameter(torch.zeros(1))
        self.optimizer = SGD([self.param], lr=0.0)
        self.scaler = DistributedGradScaler(
            "cpu", 2.0**4, growth_interval=1, reducer=reducer, fp8=scales, names={"param": self.param}
        )

    def step(self, step: Step) -> tuple[dict[str, Any], dict[str, float]]:
        for rank, name, amax in step.seen:
            # Whoever is meant and lacks the tensor leaves it to rank 0, which has all.
            meant = rank % self.world_size
            holder = meant if name in tensors_of(meant, self.world_size) else 0
            if self.rank == holder:
                self.meter.record(self.place[name], bits_of_amax(torch.tensor([amax])))
        loss = self.scaler.scale(torch.tensor(1.0))
        self.param.grad = torch.tensor([math.inf if step.overflows and self.rank == 0 else 1.0]) * loss
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mine = self.meter.scale.tolist()
        return self.scaler.state_dict(), {name: mine[place] for name, place in self.place.items()}


@given(recipe=recipes, program=st.lists(steps, min_size=1, max_size=8), world_size=st.integers(1, 3))
def test_histories_and_scales_are_those_of_the_oracle(
    recipe: DelayedScaling, program: list[Step], world_size: int
) -> None:
    oracle = Oracle(recipe, 2.0**4)
    world = ThreadRanks(world_size)
    ranks = [Rank(reducer, recipe) for reducer in world.reducers]
    for step in program:
        outcomes = world.run(lambda reducer, step=step, ranks=ranks: ranks[reducer.rank].step(step))
        oracle.step(step)
        states = [state for state, _ in outcomes]
        assert all(state == states[0] for state in states)
        assert json.loads(states[0]["fp8"]["amax_history"]) == oracle.histories
        expected = oracle.scales()
        for _, scales in outcomes:
            assert scales == {name: expected[name] for name in scales}
        if step.restarts_on:
            world_size = step.restarts_on
            world = ThreadRanks(world_size)
            ranks = [Rank(reducer, recipe) for reducer in world.reducers]
            for rank in ranks:
                rank.scaler.load_state_dict(states[0])
                mine = rank.meter.scale.tolist()
                assert {name: mine[place] for name, place in rank.place.items()} == {
                    name: expected[name] for name in rank.place
                }
