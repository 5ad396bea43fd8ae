"""A model under FSDP2, its optimizer and the scaler in one distributed checkpoint, and checkpoints that must not load.

Four ranks save, also behind the training. Two and three ranks, which have nothing else of the run, go on with it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import counted, local, poison, tiny_model
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distscale import ConfigError, DistributedGradScaler
from ranks import run_ranks

NUM_STEPS, SAVED_AT = 14, 7
FAULTS = {0: 3, 2: 1, 3: 0, 6: 2, 7: 1, 11: 2}  # rank with an inf, by step; modulo the ranks there are
RULE: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 2, "hysteresis": 2}
TORCH_RULE: dict[str, Any] = {"init_scale": 2.0**9, "growth_interval": 2}
TIMEOUT_S = 100.0
WAYS = ("save", "async_save")
SPOILED: Mapping[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str, str]] = {
    "newer": (lambda state: {**state, "version": 2, "tensors": {}}, "ConfigError", "has version 2"),
    "nan": (lambda state: {**state, "scale": math.nan}, "ConfigError", "scale is nan"),
    "negative": (lambda state: {**state, "_growth_tracker": -1}, "ConfigError", "_growth_tracker is -1"),
    "policy": (lambda state: {**state, "policy": "static"}, "ConfigError", "is of policy 'static'"),
    "cut": (lambda state: {**state, "scale": None}, "ConfigError", "scale is None"),
    "misspelt": (
        lambda state: {key.replace("hysteresis_tr", "hysteresis_Tr"): value for key, value in state.items()},
        "CheckpointException",
        "Missing key in checkpoint state_dict: scaler.hysteresis_tracker",
    ),
    "foreign": (lambda _: {"loss_scale": 2.0**9, "unskipped": 3}, "CheckpointException", "Missing key"),
    "disabled": (lambda _: {}, "CheckpointException", "Missing key"),
}


class Training:
    """Every rank has the same batch, so that the mean gradient does not depend on the number of ranks."""

    def __init__(self) -> None:
        self.model = tiny_model()
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler, self.reducer = counted(max_norm=0.5, names=self.model, **RULE)

    def steps(self, first: int, end: int) -> list[tuple[Any, ...]]:
        seen = []
        for step in range(first, end):
            self.optimizer.zero_grad()
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            self.scaler.scale(self.model(batch).square().mean()).backward()
            if step in FAULTS and dist.get_rank() == FAULTS[step] % dist.get_world_size():
                poison(next(self.model.parameters()).grad, float("inf"))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            report = self.scaler.last_step
            assert report is not None
            seen.append((report.step, report.skipped, report.scale, report.next_scale))
        return seen

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def values(self) -> dict[str, Tensor]:
        """Every parameter and every tensor of the optimizer's state, whole."""
        state = self.state()
        found: dict[str, Tensor] = dict(state["model"])
        for name, of_param in state["optimizer"]["state"].items():
            found |= {f"{name}.{key}": value for key, value in of_param.items()}
        return {
            key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for key, value in found.items()
        }


class LatePlanner(dcp.DefaultSavePlanner):
    """Looks at what it is to save only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = threading.Event()

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        assert self.may_begin.wait(timeout=60)
        super().set_up_planner(*args, **kwargs)


def save_on_four(_: int, folder: Path) -> dict[str, Any]:
    run = Training()
    seen: dict[str, Any] = {"before": run.steps(0, SAVED_AT)}
    seen["values"], seen["state"] = run.values(), run.scaler.state_dict()
    dcp.save(run.state(), checkpoint_id=folder / "save")
    for name, (spoil, *_rest) in SPOILED.items():
        dcp.save({"scaler": spoil(run.scaler.state_dict())}, checkpoint_id=folder / name)
    without = run.state()
    del without["scaler"]
    dcp.save(without, checkpoint_id=folder / "none")
    theirs = torch.amp.GradScaler("cpu", **TORCH_RULE)
    theirs.scale(torch.ones(()))
    theirs._growth_tracker.fill_(1)
    dcp.save({"scaler": theirs}, checkpoint_id=folder / "torch")
    if dist.get_rank() == 0:
        torch.save({"scaler": run.scaler.state_dict()}, folder / "scaler.pt")

    planner, group = LatePlanner(), dist.new_group(backend="gloo")  # its own: training uses the other meanwhile
    future = dcp.async_save(run.state(), checkpoint_id=folder / "async_save", planner=planner, process_group=group)
    seen["after"] = run.steps(SAVED_AT, NUM_STEPS)
    assert not future.done()
    planner.may_begin.set()
    future.result()
    dist.barrier()
    return seen | {"final values": run.values(), "final state": run.scaler.state_dict()}


def go_on(_: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for way in WAYS:
        run = Training()
        run.load(folder / way)
        values, state = run.values(), run.scaler.state_dict()
        errors = refused(run, folder) if way == "save" else {}
        seen[way] = {
            "errors": errors,
            "values": values,
            "state": state,
            "is unchanged": equal(run.values(), values),
            "after": run.steps(SAVED_AT, NUM_STEPS),
            "num_reduces": run.reducer.num_reduces,
            "final values": run.values(),
            "final state": run.scaler.state_dict(),
        }
    seen["torch.save"] = torch.load(folder / "scaler.pt", weights_only=True)["scaler"]

    run = Training()
    run.scaler.load_state_dict(torch.load(folder / "scaler.pt", weights_only=True)["scaler"])
    seen["plain file"] = run.steps(SAVED_AT, NUM_STEPS)
    seen["exchanged with torch"] = exchanged_with_torch(folder)
    return seen


def refused(run: Training, folder: Path) -> dict[str, tuple[str, str, bool]]:
    """Tries to load every spoiled checkpoint into a run; the error of each, and whether the scaler is as before."""
    errors, before = {}, run.scaler.state_dict()
    for name in (*SPOILED, "none"):
        state = run.state() if name == "none" else {"scaler": run.scaler}
        try:
            dcp.load(state, checkpoint_id=folder / name)
        except (ConfigError, CheckpointException) as error:
            errors[name] = (type(error).__name__, str(error), run.scaler.state_dict() == before)
    return errors


def exchanged_with_torch(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Torch's scaler in ours, in two ways, and ours in torch's."""
    by_its_keys, in_place = (DistributedGradScaler("cpu", **TORCH_RULE) for _ in range(2))
    state = {"scaler": torch.amp.GradScaler("cpu").state_dict()}
    dcp.load(state, checkpoint_id=folder / "torch")
    by_its_keys.load_state_dict(state["scaler"])
    dcp.load(
        {"scaler": in_place},
        checkpoint_id=folder / "torch",
        planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
    )
    theirs = torch.amp.GradScaler("cpu")
    dcp.load({"scaler": theirs}, checkpoint_id=folder / "save")
    return by_its_keys.state_dict(), in_place.state_dict(), theirs.state_dict()


def equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two sets of values are the same, bit for bit."""
    return first.keys() == second.keys() and all(
        bytes_of(value) == bytes_of(second[key]) for key, value in first.items()
    )


def bytes_of(value: Tensor) -> bytes:
    return local(value).numpy().tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    by_rank = run_ranks(save_on_four, 4, folder, timeout_s=TIMEOUT_S)
    for seen in by_rank:
        assert (seen["before"], seen["after"]) == (by_rank[0]["before"], by_rank[0]["after"])
    return by_rank[0]


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def resumed(request: pytest.FixtureRequest, saved: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    return run_ranks(go_on, request.param, folder, timeout_s=TIMEOUT_S)


def test_the_run_is_worth_saving(saved: dict[str, Any]) -> None:
    steps = saved["before"] + saved["after"]
    assert [step for step, *_ in steps] == list(range(NUM_STEPS))
    assert [step for step, skipped, *_ in steps if skipped] == sorted(FAULTS)
    fallen = [step for step, _, scale, next_scale in steps if next_scale < scale]
    assert SAVED_AT in fallen  # of two overflows in a row the second one, and the save is between them
    assert SAVED_AT - 1 in FAULTS
    assert SAVED_AT - 1 not in fallen
    assert not equal(saved["values"], saved["final values"])
    assert saved["state"] != saved["final state"]


@pytest.mark.parametrize("way", WAYS)
def test_goes_on_as_if_never_stopped(saved: dict[str, Any], resumed: list[dict[str, Any]], way: str) -> None:
    """What was saved behind the training is the state of that moment, not of the time of writing."""
    for seen in resumed:
        assert seen[way]["state"] == saved["state"]
        assert equal(seen[way]["values"], saved["values"])
        assert seen[way]["after"] == saved["after"]
        assert seen[way]["final state"] == saved["final state"]
        # Shards of other lengths are rounded elsewhere by vector instructions.
        torch.testing.assert_close(seen[way]["final values"], saved["final values"], rtol=1e-5, atol=1e-6)
        assert seen[way]["num_reduces"] == NUM_STEPS - SAVED_AT


def test_what_cannot_be_loaded_changes_nothing(resumed: list[dict[str, Any]]) -> None:
    """Neither the scaler nor, where torch sees that something is missing, the model; the run then goes on (above)."""
    wanted = {name: rest for name, (_, *rest) in SPOILED.items()}
    wanted["none"] = ["CheckpointException", "Missing key in checkpoint state_dict: scaler."]
    for seen in resumed:
        errors = seen["save"]["errors"]
        assert errors.keys() == wanted.keys()
        for name, (kind, text) in wanted.items():
            assert errors[name][0] == kind, name
            assert text in errors[name][1], name
            assert errors[name][2], name
        assert seen["save"]["is unchanged"]


def test_a_plain_file(saved: dict[str, Any], resumed: list[dict[str, Any]]) -> None:
    for seen in resumed:
        assert seen["torch.save"] == saved["state"]
        assert seen["plain file"] == saved["after"]


def test_from_torchs_scaler_and_back(saved: dict[str, Any], resumed: list[dict[str, Any]]) -> None:
    fresh = DistributedGradScaler("cpu", **TORCH_RULE).state_dict()
    for seen in resumed:
        by_its_keys, in_place, theirs = seen["exchanged with torch"]
        assert by_its_keys == in_place == {**fresh, "_growth_tracker": 1}
        assert theirs == {key: saved["state"][key] for key in theirs}


def test_one_process_without_a_group(saved: dict[str, Any], folder: Path) -> None:
    """The distributed checkpoint as a plain file, which holds nothing that has to be trusted."""
    dcp_to_torch_save(folder / "save", folder / "save.pt")
    assert torch.load(folder / "save.pt", weights_only=True)["scaler"] == saved["state"]


def test_is_a_stateful_of_torch() -> None:
    assert isinstance(DistributedGradScaler("cpu"), Stateful)
