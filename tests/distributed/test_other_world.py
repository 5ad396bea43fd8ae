"""A scaler that finds itself in another job than the one it was made in: a copy, or a process group made anew."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import error_of, poison
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from distscale import ConfigError, DistributedGradScaler, ProcessGroupReducer
from ranks import run_ranks

WORLD_SIZE = 2


class Training:
    """Of a model that all ranks hold, whose gradient is bad on one of them."""

    def __init__(self, scaler: DistributedGradScaler) -> None:
        self.scaler = scaler
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, is_bad: bool) -> Any:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.ones(1, 2)).sum()).backward()
        if is_bad:
            poison(self.model.weight.grad, float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        report = self.scaler.last_step
        assert report is not None
        return report.skipped, self.scaler.get_scale(), report.culprit and report.culprit.rank


def pickled_alone() -> bytes:
    training = Training(DistributedGradScaler("cpu", init_scale=8.0))
    training.step(False)
    return pickle.dumps(training.scaler)


def play(rank: int, folder: Path, pickled: bytes) -> dict[str, Any]:
    os.environ.pop("WORLD_SIZE")  # as where processes are not started by torchrun
    seen: dict[str, Any] = {}

    def begin(name: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=WORLD_SIZE)

    early = Training(DistributedGradScaler("cpu", init_scale=8.0))
    seen["alone"] = early.step(rank == 1)
    early = Training(DistributedGradScaler("cpu", init_scale=8.0))
    early.step(False)
    begin("first")
    seen["a group since the first step"] = early.step(rank == 1)
    seen["pickled alone"] = Training(pickle.loads(pickled)).step(rank == 1)

    for name, make in {
        "by default": lambda: DistributedGradScaler("cpu", init_scale=8.0),
        "by a mesh": lambda: DistributedGradScaler(
            "cpu", init_scale=8.0, process_group=init_device_mesh("cpu", (WORLD_SIZE,))
        ),
        "by a reducer": lambda: DistributedGradScaler("cpu", init_scale=8.0, reducer=ProcessGroupReducer()),
    }.items():
        training = Training(make())
        training.step(False)
        copies = [pickle.dumps(training.scaler)]
        dist.broadcast_object_list(copies, 0)
        seen[f"pickled on rank 0, {name}"] = Training(pickle.loads(copies[0])).step(rank == 1)

    reducer = ProcessGroupReducer(dist.new_group([0, 1]))
    grouped = [
        DistributedGradScaler("cpu", init_scale=8.0, process_group=dist.new_group([0, 1])),
        DistributedGradScaler("cpu", init_scale=8.0, reducer=reducer),
    ]
    seen["pickled with a group"] = [error_of(lambda scaler=scaler: pickle.dumps(scaler)) for scaler in grouped]
    seen["copied with a group"] = [Training(copy.deepcopy(scaler)).step(rank == 1) for scaler in grouped]

    dist.destroy_process_group()
    seen["alone again"] = early.step(False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen["in a group of its own"] = early.step(True)
    dist.destroy_process_group()
    begin("second")
    early.scaler.load_state_dict(early.scaler.state_dict() | {"scale": 8.0, "hysteresis_tracker": 1})
    seen["in another group"] = early.step(rank == 1)
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(play, WORLD_SIZE, tmp_path_factory.mktemp("stores"), pickled_alone(), init=False)


@pytest.mark.parametrize(
    "case",
    [
        "a group since the first step",
        "pickled alone",
        "pickled on rank 0, by default",
        "pickled on rank 0, by a mesh",
        "pickled on rank 0, by a reducer",
        "in another group",
    ],
)
def test_the_ranks_of_the_job_decide_together(results: list[dict[str, Any]], case: str) -> None:
    assert [seen[case] for seen in results] == [(True, 4.0, 1)] * WORLD_SIZE


def test_without_a_group_each_decides_alone(results: list[dict[str, Any]]) -> None:
    assert [seen["alone"] for seen in results] == [(False, 8.0, None), (True, 4.0, 0)]
    assert [seen["alone again"] for seen in results] == [(False, 4.0, None)] * WORLD_SIZE
    assert [seen["in a group of its own"] for seen in results] == [(True, 2.0, 0)] * WORLD_SIZE


def test_a_group_can_be_shared_by_a_copy_and_cannot_be_pickled(results: list[dict[str, Any]]) -> None:
    for seen in results:
        for kind, text in seen["pickled with a group"]:
            assert (kind, "give a DeviceMesh instead" in text) == (ConfigError.__name__, True)
        assert seen["copied with a group"] == [(True, 4.0, 1)] * 2


def test_a_copy_keeps_the_names() -> None:
    copied: Callable[[Any], Any] = copy.deepcopy
    training = Training(DistributedGradScaler("cpu"))
    twin = copied(DistributedGradScaler("cpu", names=training.model))
    training.scaler = twin
    training.step(True)
    assert twin.last_step.culprit.tensor == "weight"
