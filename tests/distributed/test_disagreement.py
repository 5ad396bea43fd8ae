"""Ranks that differ get an error that names them and their values, on all ranks; nothing is applied, nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, counted, error_of, results_by_case, run_step, set_grad, snapshot
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from distscale import DistributedGradScaler

WORLD_SIZE = 3
SCALE = 1024.0


def optimizer_of(kind: str = "sgd-momentum", value: float = 1.0) -> Optimizer:
    """Of one parameter with a gradient."""
    param = nn.Parameter(torch.ones(3))
    set_grad(param, torch.full((3,), value))
    return OPTIMIZERS[kind]([param])


def failed_step(scaler: DistributedGradScaler, *optimizers: Optimizer) -> tuple[str, str, bool]:
    """Type and text of the error of a step that must fail, and whether it left everything as it was."""
    before = snapshot(*optimizers)
    kind, text = error_of(lambda: run_step(scaler, *optimizers))
    return kind, text, snapshot(*optimizers) == before


# ---------------------------------------------------------------- at the first step


def settings(rank: int) -> dict[str, Any]:
    """C8 and its kind: one rank is built with another argument."""
    odd: dict[str, tuple[int, dict[str, Any]]] = {
        "init_scale": (1, {"init_scale": 32.0}),
        "growth_factor": (0, {"growth_factor": 4.0}),
        "growth_interval": (2, {"growth_interval": 7}),
        "hysteresis": (1, {"hysteresis": 3}),
        "min_scale": (1, {"min_scale": 2.0}),
        "max_norm": (2, {"max_norm": 1.0}),
        "policy": (0, {"policy": "none"}),
    }
    seen: dict[str, Any] = {}
    for name, (odd_rank, arguments) in odd.items():
        optimizer = optimizer_of()
        scaler, reducer = counted(**{"init_scale": SCALE, **(arguments if rank == odd_rank else {})})
        seen[name] = (*failed_step(scaler, optimizer), reducer.num_reduces)
    return seen


# ---------------------------------------------------------------- in the middle of a run


def add_one(tensor: Tensor | None) -> None:
    assert tensor is not None
    tensor.add_(1)


def load_older(scaler: DistributedGradScaler) -> None:
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "step": state["step"] - 1})


def add_param_group(optimizer: Optimizer) -> None:
    param = nn.Parameter(torch.ones(2))
    set_grad(param, torch.ones(2))
    optimizer.add_param_group({"params": [param]})


MID_RUN: dict[str, Callable[[DistributedGradScaler, Optimizer], None]] = {
    "scale": lambda scaler, optimizer: add_one(scaler._scale),
    "growth_tracker": lambda scaler, optimizer: add_one(scaler._growth_tracker),
    "hysteresis_tracker": lambda scaler, optimizer: add_one(scaler._hysteresis_tracker),
    "blocked_steps": lambda scaler, optimizer: add_one(scaler._blocked_steps),
    "step": lambda scaler, optimizer: load_older(scaler),
    "the table of tensors": lambda scaler, optimizer: add_param_group(optimizer),
}


def mid_run(rank: int) -> dict[str, Any]:
    """Rank 1 changes on its own, after two good steps; all ranks read their decisions, or none (fused), or some."""
    kinds = {
        "all read": ["adamw-foreach"] * 3,
        "none reads": ["adamw-fused"] * 3,
        "only the odd one reads": ["adamw-fused", "adamw-foreach", "adamw-fused"],
        "only the odd one does not": ["adamw-foreach", "adamw-fused", "adamw-foreach"],
    }
    return {
        (reads, name): _mid_run(rank, by_rank[rank], change)
        for reads, by_rank in kinds.items()
        for name, change in MID_RUN.items()
    }


def _mid_run(rank: int, kind: str, change: Callable[[DistributedGradScaler, Optimizer], None]) -> Any:
    param = nn.Parameter(torch.ones(3))
    set_grad(param, torch.ones(3))
    optimizer = OPTIMIZERS[kind]([param])
    scaler, reducer = counted(init_scale=SCALE, names={"weight": param})
    for _ in range(2):
        run_step(scaler, optimizer)
    if rank == 1:
        change(scaler, optimizer)
    kind, text, is_untouched = failed_step(scaler, optimizer)
    return kind, text, is_untouched, reducer.num_reduces


def after_scaling(rank: int) -> tuple[str, str, bool]:
    """The scale that the gradients carry differs, although the scalers' own scales are equal again."""
    optimizer = optimizer_of()
    scaler, _ = counted(init_scale=SCALE)
    run_step(scaler, optimizer)
    if rank == 2:
        assert scaler._scale is not None
        scaler._scale.mul_(2)
    scaler.scale(torch.ones(()))
    if rank == 2:
        scaler._scale.div_(2)
    before = snapshot(optimizer)
    kind, text = error_of(lambda: scaler.step(optimizer))
    return kind, text, snapshot(optimizer) == before


def grown_everywhere(rank: int) -> tuple[Any, ...]:
    """The same change on all ranks is none: a group that all add is agreed on anew, and counts."""
    optimizer = optimizer_of("adamw-fused")
    scaler, reducer = counted(init_scale=1.0, max_norm=100.0)
    run_step(scaler, optimizer)
    counts = [(reducer.num_reduces, reducer.num_gathers)]
    add_param_group(optimizer)
    norms = []
    for _ in range(2):
        for group in optimizer.param_groups:
            set_grad(group["params"][0], torch.full_like(group["params"][0], 2.0))
        norms.append(run_step(scaler, optimizer).grad_norm)
        counts.append((reducer.num_reduces, reducer.num_gathers))
    return norms, counts


def new_optimizer_on_one_rank(rank: int) -> tuple[str, str, bool]:
    """After a good step, rank 1 steps an optimizer that the others have never seen."""
    first, second = optimizer_of(), optimizer_of()
    scaler, _ = counted(init_scale=SCALE)
    run_step(scaler, first)
    return failed_step(scaler, second if rank == 1 else first)


# ---------------------------------------------------------------- a rank that cannot take part, or speaks up


class Unreadable(Tensor):
    """A tensor whose values cannot be had."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "view" in getattr(func, "__name__", ""):
            raise RuntimeError("this tensor cannot be read")
        return super().__torch_function__(func, types, args, kwargs or {})


def failures(rank: int) -> dict[str, Any]:
    """Rank 2 raises while it looks at its gradients; a good step before it, or none.

    After a good step, the fused optimizers of the others do not read the decision before they have stepped.
    """
    seen: dict[str, Any] = {}
    for kind in ("dtype", "subclass", "subclass, fused"):
        for num_good_steps in (0, 1):
            good = optimizer_of("adamw-fused" if kind == "subclass, fused" else "sgd-momentum")
            scaler, reducer = counted(init_scale=SCALE, max_norm=1.0)
            for _ in range(num_good_steps):
                run_step(scaler, good)
            if rank == 2 and kind == "dtype":
                param = good.param_groups[0]["params"][0]
                param.data = torch.ones(3).to(torch.float8_e5m2fnuz)
                param.grad = torch.ones(3).to(torch.float8_e5m2fnuz)
            elif rank == 2:
                good.param_groups[0]["params"][0].grad = torch.ones(3).as_subclass(Unreadable)
            before = snapshot(good) if rank != 2 else None
            error = error_of(lambda scaler=scaler, good=good: run_step(scaler, good))
            untouched = rank == 2 or snapshot(good) == before
            seen[f"{kind} {num_good_steps}"] = (*error, untouched, reducer.num_reduces)
    return seen


def votes(rank: int) -> dict[str, Any]:
    """A veto on each rank in turn, and a request to stop on one, on the reading and on the fused path."""
    seen: dict[str, Any] = {}
    for kind in ("adamw-foreach", "adamw-fused"):
        optimizer = optimizer_of(kind)
        scaler, reducer = counted(init_scale=SCALE, growth_interval=3)
        steps = []
        for step in range(7):
            before = snapshot(optimizer)
            if step in (1, 2, 3) and rank == step - 1:
                scaler.veto("the loss is a spike")
            if step == 5 and rank == 1:
                scaler.request_stop()
            report = run_step(scaler, optimizer)
            is_same = snapshot(optimizer) == before
            steps.append((report.skipped, is_same, report.vetoed_by, report.culprit, report.next_scale))
            steps[-1] += (report.stop_requested,)
        seen[kind] = (steps, reducer.num_reduces)
    return seen


def torch_scaler(rank: int) -> tuple[float, list[float]]:
    """For comparison: ranks of torch.amp.GradScaler with another init_scale each."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank)
    param = optimizer.param_groups[0]["params"][0]
    # A gradient that is summed over ranks carries the mean of their scales; each divides by its own.
    set_grad(param, torch.full((1,), (1.0 + 2.0 + 4.0) / 3.0))
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), param.tolist()


CASES = [
    settings,
    mid_run,
    after_scaling,
    grown_everywhere,
    new_optimizer_on_one_rank,
    failures,
    votes,
    torch_scaler,
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


SETTINGS = {
    "init_scale": ("1024.0 on ranks 0, 2", "32.0 on rank 1"),
    "growth_factor": ("4.0 on rank 0", "2.0 on ranks 1, 2"),
    "growth_interval": ("2000 on ranks 0, 1", "7 on rank 2"),
    "hysteresis": ("1 on ranks 0, 2", "3 on rank 1"),
    "min_scale": ("e-38 on ranks 0, 2", "2.0 on rank 1"),
    "max_norm": ("None on ranks 0, 1", "1.0 on rank 2"),
    "policy": ("'none' on rank 0", "'dynamic' on ranks 1, 2"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_c8_settings_that_differ(results: dict[str, list[Any]], name: str) -> None:
    for kind, text, is_untouched, num_reduces in (seen[name] for seen in results["settings"]):
        assert kind == "DesyncError"
        assert f"ranks differ in {name} at the first step" in text
        for value in SETTINGS[name]:
            assert value in text
        assert is_untouched
        assert num_reduces == 0


def test_c8_torch_notices_nothing(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about."""
    scales, values = zip(*results["torch_scaler"], strict=True)
    assert scales == (1.0, 2.0, 4.0)
    assert len({value[0] for value in values}) == 3


MID_RUN_VALUES = {
    "scale": ("1024.0 on ranks 0, 2", "1025.0 on rank 1"),
    "growth_tracker": ("2 on ranks 0, 2", "3 on rank 1"),
    "hysteresis_tracker": ("1 on ranks 0, 2", "2 on rank 1"),
    "blocked_steps": ("0 on ranks 0, 2", "1 on rank 1"),
    "step": ("2 on ranks 0, 2", "1 on rank 1"),
    "the table of tensors": ("'no. ", "' on ranks 0, 2", "'with new parameters' on rank 1"),
}
MID_RUN_RANGES = {
    "scale": "from 1024 to 1025, rank 1 unlike ranks 0 ... 2",
    "growth_tracker": "from 2 to 3, rank 1 unlike ranks 0 ... 2",
    "hysteresis_tracker": "from 1 to 2, rank 1 unlike ranks 0 ... 2",
    "blocked_steps": "from 0 to 1, rank 1 unlike ranks 0 ... 2",
    "step": "from 1 to 2, rank 1 unlike ranks 0 ... 2",
    "the table of tensors": "at step 2 some ranks stepped an optimizer that is new or has new parameters, and others"
    " did not, rank 1 unlike ranks 0 ... 2",
}


@pytest.mark.parametrize("name", MID_RUN_VALUES)
@pytest.mark.parametrize("reads", ["all read", "none reads", "only the odd one reads", "only the odd one does not"])
def test_ranks_that_part_in_mid_run(results: dict[str, list[Any]], name: str, reads: str) -> None:
    for kind, text, is_untouched, num_reduces in (seen[reads, name] for seen in results["mid_run"]):
        assert kind == "DesyncError"
        # Which value each rank has takes a gather, for which all ranks must stand at the same place.
        # A fused optimizer reads again at its first step after a load, or with a new gradient.
        reads_again = reads == "only the odd one does not" and name in ("step", "the table of tensors")
        all_read = reads == "all read" or reads_again
        assert (f"ranks differ in {name} at step" in text) == (all_read or name != "the table of tensors")
        for value in MID_RUN_VALUES[name] if all_read else [MID_RUN_RANGES[name]]:
            assert value in text
        assert is_untouched
        assert num_reduces == 3


def test_gradients_of_another_scale(results: dict[str, list[Any]]) -> None:
    for kind, text, is_untouched in results["after_scaling"]:
        assert kind == "DesyncError"
        assert "ranks differ in loss_scale at step 1: 1024.0 on ranks 0, 1; 2048.0 on rank 2" in text
        assert "In a pipeline, call update() once, after the steps of all optimizers" in text
        assert is_untouched


def test_a_group_that_all_ranks_add(results: dict[str, list[Any]]) -> None:
    for norms, counts in results["grown_everywhere"]:
        assert norms == [pytest.approx((5 * 4.0) ** 0.5, rel=1e-6)] * 2
        # Once, an exchange and a gather for the new table.
        assert counts == [(1, 1), (3, 2), (4, 2)]


def test_a_new_optimizer_on_one_rank(results: dict[str, list[Any]]) -> None:
    for kind, text, is_untouched in results["new_optimizer_on_one_rank"]:
        assert kind == "DesyncError"
        assert "ranks differ in the table of tensors at step 1" in text
        assert "'with new parameters' on rank 1" in text
        assert is_untouched


@pytest.mark.parametrize("num_good_steps", [0, 1])
@pytest.mark.parametrize(
    ("fault", "own_error", "own_text"),
    [
        ("dtype", "TypeError", "float8_e5m2fnuz"),
        ("subclass", "RuntimeError", "cannot be read"),
        ("subclass, fused", "RuntimeError", "cannot be read"),
    ],
)
def test_a_rank_that_fails_in_its_sweep(
    results: dict[str, list[Any]], fault: str, own_error: str, own_text: str, num_good_steps: int
) -> None:
    for rank, seen in enumerate(results["failures"]):
        kind, text, is_untouched, num_reduces = seen[f"{fault} {num_good_steps}"]
        assert kind == (own_error if rank == 2 else "ProtocolError")
        assert (own_text if rank == 2 else "rank 2 failed before the exchange") in text
        assert is_untouched
        assert num_reduces == num_good_steps + 1


@pytest.mark.parametrize("kind", ["adamw-foreach", "adamw-fused"])
def test_votes(results: dict[str, list[Any]], kind: str) -> None:
    for seen in results["votes"]:
        steps, num_reduces = seen[kind]
        assert num_reduces == len(steps) == 7
        assert [skipped for skipped, *_ in steps] == [False, True, True, True, False, False, False]
        assert [is_same for _, is_same, *_ in steps] == [False, True, True, True, False, False, False]
        assert [vetoed_by for _, _, vetoed_by, *_ in steps] == [None, 0, 1, 2, None, None, None]
        assert {culprit for _, _, _, culprit, *_ in steps} == {None}
        # A veto is no overflow: the scale neither backs off, nor does the run of clean steps end.
        assert [scale for *_, scale, _ in steps] == [SCALE] * 5 + [2 * SCALE] * 2
        assert [stop for *_, stop in steps] == [False] * 5 + [True] * 2
