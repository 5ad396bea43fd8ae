"""Saved on four ranks, continued on two and on three: the same bits as if never stopped."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import counted, poison, snapshot, tiny_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD

from distscale import DistributedGradScaler
from ranks import run_ranks

WORLD_SIZE = 4
NUM_STEPS, SAVED_AT = 16, 7
FAULTS = {0: 3, 2: 1, 3: 0, 6: 2, 7: 1, 9: 0, 13: 2}  # rank with an inf, by step; modulo the ranks there are
RULE = {"init_scale": 2.0**12, "growth_interval": 2, "hysteresis": 2}
SAVED_WITH = ["torch.save", "dcp", "dcp, as an object"]


class Run:
    """A training whose numbers do not depend on the number of ranks: one sharded tensor, an elementwise gradient."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        ranks = list(range(num_ranks))
        self.group = dist.new_group(ranks)
        mesh = DeviceMesh("cpu", ranks)
        self.is_here = dist.get_rank() < num_ranks
        if self.is_here:
            self.param = nn.Parameter(distribute_tensor(torch.linspace(-1.0, 1.0, 24), mesh, [Shard(0)]))
            self.optimizer = SGD([self.param], lr=0.1)
            self.scaler, self.reducer = counted(process_group=self.group, names={"weight": self.param}, **RULE)

    def steps(self, first: int, end: int) -> list[Any]:
        """Runs some steps; what happened in each, and every bit of the tensor after it."""
        seen = []
        for step in range(first, end):
            self.optimizer.zero_grad()
            self.scaler.scale(self.param.sin().sum().full_tensor()).backward()
            if step in FAULTS and dist.get_rank() == FAULTS[step] % self.num_ranks:
                poison(self.param.grad, float("inf"))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            report = self.scaler.last_step
            assert report is not None
            values = self.values().detach().numpy().tobytes()
            seen.append((report.step, report.skipped, report.scale, report.next_scale, values))
        return seen

    def values(self) -> Tensor:
        assert isinstance(self.param, DTensor)
        return self.param.full_tensor()


def save_and_continue(rank: int, folder: Path) -> dict[str, Any]:
    whole = Run(4)
    seen: dict[str, Any] = {"before": whole.steps(0, SAVED_AT)}
    buffer = io.BytesIO()
    torch.save({"scaler": whole.scaler.state_dict()}, buffer)
    saved_param = whole.values().detach().clone()
    dcp.save({"weight": whole.param, "scaler": whole.scaler.state_dict()}, checkpoint_id=folder / "dcp")
    dcp.save({"weight": whole.param, "scaler": whole.scaler}, checkpoint_id=folder / "dcp, as an object")
    seen["uninterrupted"] = whole.steps(SAVED_AT, NUM_STEPS)
    seen["state"] = whole.scaler.state_dict()

    for num_ranks in (2, 3, 4):
        for saved_with in SAVED_WITH:
            run = Run(num_ranks)
            if run.is_here:
                _load(run, saved_with, buffer.getvalue(), saved_param, folder)
                resumed_at = run.scaler.get_scale()  # C19: asked before the first scale()
                continued = run.steps(SAVED_AT, NUM_STEPS)
                counts = (run.reducer.num_reduces, run.reducer.num_gathers)
                seen[num_ranks, saved_with] = (resumed_at, continued, run.scaler.state_dict(), counts)
    dist.barrier()  # groups are made by all ranks, and a rank may be ahead
    return seen | {"c18": c18(rank)}


def _load(run: Run, saved_with: str, saved: bytes, saved_param: Tensor, folder: Path) -> None:
    if saved_with == "torch.save":
        run.scaler.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True)["scaler"])
        part = distribute_tensor(saved_param, run.param.device_mesh, [Shard(0)])
        with torch.no_grad():
            run.param.copy_(part)
        return
    state: dict[str, Any] = {"weight": run.param, "scaler": run.scaler}
    if saved_with == "dcp":
        state["scaler"] = run.scaler.state_dict()
    dcp.load(state, checkpoint_id=folder / saved_with, process_group=run.group)
    if saved_with == "dcp":
        run.scaler.load_state_dict(state["scaler"])


def c18(rank: int) -> tuple[bool, bool]:
    """Saving an optimizer that has not stepped yet makes torch run a dummy step; the scaler has no part in it."""
    model = tiny_model()
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(WORLD_SIZE))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = DistributedGradScaler("cpu", init_scale=1024.0, growth_interval=1)
    before = scaler.state_dict()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    weights = snapshot(optimizer)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    return scaler.state_dict() == before, snapshot(optimizer) != weights


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(save_and_continue, WORLD_SIZE, tmp_path_factory.mktemp("checkpoints"))


def test_the_run_is_worth_restarting(results: list[dict[str, Any]]) -> None:
    """Skips and growth on both sides of the save, and a hysteresis in mid-count at it."""
    steps = results[0]["before"] + results[0]["uninterrupted"]
    for seen in results:
        assert seen["before"] + seen["uninterrupted"] == steps
    assert [step for step, *_ in steps] == list(range(NUM_STEPS))
    assert [step for step, skipped, *_ in steps if skipped] == sorted(FAULTS)
    grown = [step for step, _, scale, next_scale, _ in steps if next_scale > scale]
    fallen = [step for step, _, scale, next_scale, _ in steps if next_scale < scale]
    assert min(grown) < SAVED_AT < max(grown)
    assert min(fallen) < SAVED_AT < max(fallen)
    # Of two overflows in a row only the second one lowers the scale, and the save is between them.
    assert SAVED_AT - 1 in FAULTS
    assert SAVED_AT in FAULTS
    assert SAVED_AT - 1 not in fallen
    assert SAVED_AT in fallen


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("saved_with", SAVED_WITH)
def test_continues_bitwise(results: list[dict[str, Any]], num_ranks: int, saved_with: str) -> None:
    for rank, seen in enumerate(results):
        assert ((num_ranks, saved_with) in seen) == (rank < num_ranks)
    for seen in results[:num_ranks]:
        resumed_at, continued, state, counts = seen[num_ranks, saved_with]
        assert resumed_at == results[0]["before"][-1][3]
        assert continued == results[0]["uninterrupted"]
        assert state == results[0]["state"]
        assert counts == (NUM_STEPS - SAVED_AT, 1)


def test_c18_saving_does_not_touch_the_scaler(results: list[dict[str, Any]]) -> None:
    assert [seen["c18"] for seen in results] == [(True, True)] * WORLD_SIZE
