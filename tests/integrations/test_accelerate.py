"""Hugging Face Accelerate, for real, on two gloo ranks: FSDP1 and FSDP2 in FP16, checkpoints, DDP."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import error_of, local, on_all, poison, results_by_case, snapshot, tiny_model
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from distscale import DistributedGradScaler

WORLD_SIZE = 2
SCALE = 1024.0
RATE = 2.0**-6
MAX_NORM = 0.01
LAYOUTS = [(version, fused) for version in (1, 2) for fused in (False, True)]


def new_accelerator(fsdp_version: int | None = None, **arguments: Any) -> Any:
    """A new Accelerator, which forgets the one before it.

    Accelerate gives FSDP to GPUs only, and would pass over the plugin on a CPU; so it is told that there are some.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    os.environ.update(LOCAL_WORLD_SIZE=str(WORLD_SIZE), OMP_NUM_THREADS="1")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if fsdp_version is None:
        return Accelerator(cpu=True, **arguments)
    state = PartialState(cpu=True)
    state.distributed_type = DistributedType.MULTI_GPU
    state.device = torch.device("cpu")  # without the index of a GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=fsdp_version,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
        **({"use_orig_params": True, "sync_module_states": False} if fsdp_version == 1 else {}),
    )
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", fsdp_plugin=plugin, **arguments)
    accelerator.native_amp = True  # as on a GPU; it only leaves out the autocast, which FSDP's fp16 makes needless
    assert accelerator.distributed_type is DistributedType.FSDP
    return accelerator


def held_grads(model: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's parts of the gradients, without empty ones."""
    grads = [local(param.grad) for param in model.parameters() if param.grad is not None]
    return [grad for grad in grads if grad.numel()]


def run_steps(
    accelerator: Any, kind: type[GradScaler], rank: int, fused: bool, bad_ranks: tuple[int | None, ...]
) -> list[Any]:
    """One step for each entry, in which that rank alone has an inf."""
    model = tiny_model()
    names = {"names": model} if kind is DistributedGradScaler else {}
    scaler = accelerator.scaler = kind("cpu", init_scale=SCALE, **names)  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=RATE, fused=fused)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    seen = []
    for bad_rank in bad_ranks:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4)).float().square().mean()
        accelerator.backward(loss)
        if rank == bad_rank:
            poison(held_grads(model)[0], torch.inf)
        before = snapshot(optimizer)
        optimizer.step()
        scheduler.step()
        if isinstance(scaler, DistributedGradScaler) and bad_rank is not None:
            culprit = scaler.last_step.culprit
            assert (culprit.rank, culprit.tensor[:2], culprit.kind) == (bad_rank, "0.", "inf"), culprit
        seen.append(
            (
                accelerator.optimizer_step_was_skipped,
                scaler.get_scale(),
                snapshot(optimizer) == before,
                scheduler.get_last_lr()[0],
            )
        )
    return seen


def c15(rank: int) -> dict[str, Any]:
    """The flag, the scale, the parameters and the learning rate, with this scaler and with its own choice."""
    seen: dict[str, Any] = {}
    for version, fused in LAYOUTS:
        for kind in (DistributedGradScaler, ShardedGradScaler if version == 1 else GradScaler):
            steps = run_steps(new_accelerator(version), kind, rank, fused, (1, None, 0, None, 1))
            seen[f"{kind.__name__}, {version}, {fused}"] = steps
    return seen


def clipping(rank: int) -> dict[str, Any]:
    """Its own clipping, which unscales first, and once too often (C17); in the second step with an inf on one rank."""
    seen: dict[str, Any] = {}
    for version, fused in LAYOUTS:
        accelerator = new_accelerator(version)
        scaler = accelerator.scaler = DistributedGradScaler("cpu", init_scale=SCALE)
        model = tiny_model()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=RATE, fused=fused))
        steps: list[Any] = []
        for bad_rank in (None, 1, None):
            optimizer.zero_grad()
            accelerator.backward(model(torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4)).float().square().mean())
            if rank == bad_rank:
                poison(held_grads(model)[0], torch.inf)
            carried, unscaled = scaler.get_scale(), _norm(model)
            norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            norms = (unscaled / carried, float(norm.full_tensor() if isinstance(norm, DTensor) else norm), _norm(model))
            if bad_rank is not None:
                norms = (0.0, 0.0, 0.0)
            again = error_of(lambda run=accelerator, model=model: run.clip_grad_norm_(model.parameters(), MAX_NORM))
            before = snapshot(optimizer)
            optimizer.step()
            steps.append((accelerator.optimizer_step_was_skipped, snapshot(optimizer) == before, norms, again))
        seen[f"{version}, {fused}"] = steps
    return seen


def _norm(model: torch.nn.Module) -> float:
    """Over all ranks, in float64. Collective."""
    squares = torch.stack([grad.double().square().sum() for grad in held_grads(model)]).sum()
    dist.all_reduce(squares)
    return float(squares) ** 0.5


def accumulation(rank: int) -> list[Any]:
    """Two micro-batches a step: one decision for both, and an inf in the first one counts."""
    accelerator = new_accelerator(2, gradient_accumulation_steps=2)
    scaler = accelerator.scaler = DistributedGradScaler("cpu", init_scale=SCALE)
    model = tiny_model()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=RATE, fused=True))
    seen = []
    for micro_batch in range(6):
        with accelerator.accumulate(model):
            x = torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4)
            is_bad = micro_batch == 2 and rank == 1
            before = snapshot(optimizer)
            # The product overflows in FP16 on the way back: the loss itself is finite.
            accelerator.backward(model(x).float().square().mean() * (1e8 if is_bad else 1.0))
            optimizer.step()
            optimizer.zero_grad()
            report = scaler.last_step
            seen.append((report and (report.step, report.skipped), snapshot(optimizer) == before, scaler.get_scale()))
    return seen


def c16(rank: int) -> dict[str, Any]:
    """Two optimizers over DDP, each of which Accelerate follows by an ``update()``; the first one overflows."""
    seen: dict[str, Any] = {}
    for kind in (DistributedGradScaler, GradScaler):
        accelerator = new_accelerator()
        accelerator.scaler = kind("cpu", init_scale=SCALE)
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        model, first, second = accelerator.prepare(model, *(SGD(layer.parameters(), lr=RATE) for layer in model))
        # Of the loss 3wv, at w = v = 1, the gradient of either is 3.
        accelerator.backward(model(torch.full((1, 1), 3.0)).sum())
        if rank == 1:
            poison(first.param_groups[0]["params"][0].grad, torch.inf)
        first.step()
        second.step()
        moved = [(1.0 - param.item()) / RATE for param in model.parameters()]
        seen[kind.__name__] = (moved, [first.step_was_skipped, second.step_was_skipped])
    return seen


def c18(rank: int) -> dict[str, Any]:
    """Saves and loads under FSDP2, whose optimizer state goes through ``torch.distributed.checkpoint``."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    seen: dict[str, Any] = {}
    for kind in (DistributedGradScaler, GradScaler):
        for name in ("adamw", "adamw-fused", "sgd") if kind is DistributedGradScaler else ("adamw",):
            path = Path(str(folder[0])) / f"{kind.__name__}-{name}"
            accelerator = _trained(kind, name)
            states = [accelerator.scaler.state_dict()]
            accelerator.save_state(str(path))
            accelerator.wait_for_everyone()  # every rank has written the one scaler.pt, and a peer's may be half of it
            states.append(accelerator.scaler.state_dict())
            states.append(torch.load(path / "scaler.pt"))
            errors = [error_of(lambda path=path, run=accelerator: run.load_state(str(path)))]  # type: ignore[misc]
            states.append(accelerator.scaler.state_dict())
            fresh = _trained(kind, name, num_steps=0)
            errors.append(error_of(lambda path=path, run=fresh: run.load_state(str(path))))  # type: ignore[misc]
            states.append(fresh.scaler.state_dict())
            # And the restored one goes on as the other does.
            ends = [(_train(run, rank), run.scaler.state_dict()) for run in (accelerator, fresh)]
            seen[f"{kind.__name__}, {name}"] = (states, [text for _, text in errors], ends[0] == ends[1])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(folder[0]))
    return seen


def _trained(kind: type[GradScaler], name: str, num_steps: int = 3) -> Any:
    accelerator = new_accelerator(2)
    # Grows at every second step, so that one step more or less shows.
    accelerator.scaler = kind("cpu", init_scale=SCALE, growth_interval=2)
    model = tiny_model()
    params = model.parameters()
    accelerator.prepare(model, SGD(params, lr=RATE) if name == "sgd" else AdamW(params, lr=RATE, fused="fused" in name))
    for _ in range(num_steps):
        _train(accelerator, dist.get_rank())
    return accelerator


def _train(accelerator: Any, rank: int) -> list[bytes]:
    (model,), (optimizer,) = accelerator._models, accelerator._optimizers
    accelerator.backward(model(torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return snapshot(optimizer)


CASES = [c15, clipping, accumulation, c16, c18]
SKIPS = [True, False, True, False, True]
SCALES = [SCALE / 2, SCALE / 2, SCALE / 4, SCALE / 4, SCALE / 8]
# Accelerate steps a scheduler once for each rank, and not at all if the step was skipped.
RATES = [RATE, RATE / 4, RATE / 4, RATE / 16, RATE / 16]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_c14_c15_a_skip_is_known_as_one(results: dict[str, list[Any]], version: int, fused: bool) -> None:
    seen = on_all([rank_seen[f"DistributedGradScaler, {version}, {fused}"] for rank_seen in results["c15"]])
    assert seen == list(zip(SKIPS, SCALES, SKIPS, RATES, strict=True))


def test_c15_with_the_scaler_of_its_own_choice_it_is_not(results: dict[str, list[Any]]) -> None:
    # What this library is for: with a fused optimizer all flags are wrong, and under FSDP1 each rank is on its own.
    fsdp1, fsdp2 = (
        [rank_seen[f"{kind}, {version}, True"] for rank_seen in results["c15"]]
        for kind, version in (("ShardedGradScaler", 1), ("GradScaler", 2))
    )
    for rank_seen in (*fsdp1, *fsdp2):
        assert [skipped for skipped, *_ in rank_seen] == [False] * 5
        assert [rate for *_, rate in rank_seen] == [RATE / 4**step for step in range(1, 6)]
    # The first one is skipped too, on all ranks, and has created the optimizer's state.
    assert [untouched for _, _, untouched, _ in on_all(fsdp2)] == [False, False, True, False, True]
    # In the third step rank 0 has the inf: it skips, and rank 1 steps. The scales differ from the first one on.
    assert [rank_seen[2][2] for rank_seen in fsdp1] == [True, False]
    assert [rank_seen[0][1] for rank_seen in fsdp1] == [SCALE, SCALE / 2]


def test_its_clipping_sees_unscaled_gradients_once(results: dict[str, list[Any]]) -> None:
    for name, steps in on_all(results["clipping"]).items():
        assert [step[:2] for step in steps] == [(False, False), (True, True), (False, False)], name
        for skipped, _, (norm, reported, clipped), (kind, text) in steps:
            assert reported == pytest.approx(norm, rel=1e-6), name
            assert skipped or (norm > MAX_NORM and clipped == pytest.approx(MAX_NORM, rel=1e-4)), name
            assert kind == "ProtocolError" and "twice" in text, name  # C17


def test_accumulated_micro_batches_are_decided_upon_together(results: dict[str, list[Any]]) -> None:
    first, bad, last = (0, False), (1, True), (2, False)
    assert on_all(results["accumulation"]) == [
        (None, True, SCALE),
        (first, False, SCALE),
        (first, True, SCALE),
        (bad, True, SCALE / 2),
        (bad, True, SCALE / 2),
        (last, False, SCALE / 2),
    ]


def test_c16_the_second_optimizer_gets_the_gradient_of_its_loss(results: dict[str, list[Any]]) -> None:
    for seen in results["c16"]:
        assert seen["DistributedGradScaler"] == ([0.0, 3.0], [True, False])
    # torch's: rank 0 steps the first one, rank 1 gives the second one twice its gradient.
    assert [seen["GradScaler"] for seen in results["c16"]] == [
        ([3.0, 3.0], [False, False]),
        ([0.0, 6.0], [True, False]),
    ]


@pytest.mark.parametrize("name", ["adamw", "adamw-fused", "sgd"])
def test_c18_saving_and_loading_leaves_the_scaler_as_it_was(results: dict[str, list[Any]], name: str) -> None:
    states, errors, is_equal_later = on_all([seen[f"DistributedGradScaler, {name}"] for seen in results["c18"]])
    assert errors == ["", ""]
    assert all(state == states[0] for state in states)
    assert (states[0]["step"], states[0]["scale"], states[0]["_growth_tracker"]) == (3, 2 * SCALE, 1)
    assert is_equal_later


def test_c18_with_torchs_scaler_it_does_not(results: dict[str, list[Any]]) -> None:
    states, errors, is_equal_later = on_all([seen["GradScaler, adamw"] for seen in results["c18"]])
    assert errors == ["_growth_tracker initialized before _scale", ""]
    assert [state["scale"] for state in states] == [2 * SCALE] * 4 + [4 * SCALE]
    assert not is_equal_later
