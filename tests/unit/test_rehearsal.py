"""The step that only creates an optimizer's state, as ``torch.distributed.checkpoint`` does it: nothing is learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, AdamW, Optimizer

from distscale import DistributedGradScaler, LocalReducer, ProtocolError
from ranks import CountingReducer, ThreadReducer, run_threads

SCALE = 1024.0


class Stepping(Optimizer):
    """An optimizer that leads its step through a scaler, as Accelerate's does."""

    def __init__(self, optimizer: Optimizer, scaler: DistributedGradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.param_groups, self.state, self.state_dict = optimizer.param_groups, optimizer.state, optimizer.state_dict

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_the_step_of_a_checkpoint_changes_nothing(kind: Any, fused: bool) -> None:
    model = nn.Linear(2, 1)
    reports: list[Any] = []
    reducer = CountingReducer(LocalReducer())
    scaler = DistributedGradScaler("cpu", init_scale=SCALE, growth_interval=1, reducer=reducer, on_step=reports.append)
    optimizer = Stepping(kind(model.parameters(), lr=1.0, fused=fused), scaler)
    before, values = scaler.state_dict(), [param.clone() for param in model.parameters()]
    scaler.veto("is for the next step of training")

    get_optimizer_state_dict(model, optimizer)

    assert scaler.state_dict() == before
    assert (reports, scaler.last_step, reducer.num_reduces) == ([], None, 1)
    assert len(optimizer.state) == (2 if kind is AdamW else 0)
    assert all(torch.equal(param, value) for param, value in zip(model.parameters(), values, strict=True))
    # Training goes on as if nothing had been; the veto is still there.
    for is_vetoed in (True, False):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()
        assert (scaler.last_step.skipped, scaler.last_step.vetoed_by) == (is_vetoed, 0 if is_vetoed else None)
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
    assert [report.step for report in reports] == [0, 1]
    assert scaler.get_scale() == 2 * SCALE


def test_a_first_step_at_rate_zero_counts() -> None:
    # A warm-up begins so; and the gradients may be zero.
    param = nn.Parameter(torch.zeros(2))
    optimizer = AdamW([param], lr=0.0)
    scaler = DistributedGradScaler("cpu", init_scale=SCALE, growth_interval=1)
    scaler.scale((param * 0.0).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.last_step.step, scaler.get_scale()) == (0, 2 * SCALE)


def test_a_forgotten_scale_is_still_an_error() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    with pytest.raises(ProtocolError, match=r"no rank has called scaler.scale\(loss\)"):
        DistributedGradScaler("cpu").step(AdamW([param], lr=0.0))


def _step(reducer: ThreadReducer, kind: str) -> tuple[int, bool, int]:
    """A step that looks like a rehearsal on rank 1, and on rank 0 like ``kind`` of one."""
    param = nn.Parameter(torch.zeros(2))
    is_odd = reducer.rank == 0
    param.grad = torch.full((2,), float(kind == "gradient" and is_odd))
    optimizer = AdamW([param], lr=float(kind == "rate" and is_odd))
    scaler = DistributedGradScaler("cpu", init_scale=SCALE, reducer=reducer)
    scaler.scale(torch.zeros(()))
    scaler._loss_bits = None if kind != "loss" or not is_odd else scaler._loss_bits
    scaler.step(*() if kind == "no optimizer" and is_odd else (optimizer,))
    scaler.update()
    report = scaler.last_step
    return scaler.state_dict()["step"], report is not None, len(optimizer.state)


@pytest.mark.parametrize("kind", ["gradient", "rate", "loss", "no optimizer", "rehearsal"])
def test_all_ranks_agree_on_what_it_was(kind: str) -> None:
    seen = run_threads(_step, 2, kind)
    counts = kind != "rehearsal"
    assert seen[1] == (int(counts), counts, 1)
    assert seen[0] == (int(counts), counts, 0 if kind == "no optimizer" else 1)
