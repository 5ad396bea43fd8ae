"""torch's scalers on the gradients of four ranks, beside ours: ShardedGradScaler with FSDP1, GradScaler with FSDP2.

All cases run in one spawn. Where the classes differ on purpose, a test has "differs" in its name and states both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from distscale import DistributedGradScaler
from ranks import run_ranks

WORLD_SIZE = 4
INF = float("inf")
SCALE = 16.0
CLASSES = {scaler.__name__: scaler for scaler in (GradScaler, ShardedGradScaler, DistributedGradScaler)}


def scaler_of(name: str) -> GradScaler:
    scaler: GradScaler = CLASSES[name]("cpu", init_scale=SCALE)  # type: ignore[abstract]
    return scaler


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(optimizer: Optimizer) -> list[bytes]:
    tensors = []
    for param in optimizer.param_groups[0]["params"]:
        state = optimizer.state.get(param, {})
        tensors += [param, *(torch.as_tensor(state[key]) for key in sorted(state) if state[key] is not None)]
    return [local(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def flags(scaler: GradScaler, optimizer: Optimizer) -> list[float]:
    return [float(local(flag)) for flag in scaler._found_inf_per_device(optimizer).values()]


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * index + rank))


# ---------------------------------------------------------------- gradients of each rank's own


def one_step(rank: int, name: str, fused: bool, unscales: bool, bad: float) -> dict[str, Any]:
    """Plain parameters; rank 2 alone has the bad gradient."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([SCALE, bad if rank == 2 else SCALE])
    optimizer = SGD([param], lr=1.0, fused=fused)
    scaler = scaler_of(name)
    scaler.scale(torch.ones(()))
    seen: dict[str, Any] = {}
    if unscales:
        scaler.unscale_(optimizer)
        seen["unscaled"] = flags(scaler, optimizer)
    scaler.step(optimizer)
    seen |= {"stepped": flags(scaler, optimizer), "has_moved": param[0].item() != 0.0}
    scaler.update()
    return seen | {"scale": scaler.get_scale()}


def one_steps(rank: int) -> dict[tuple[Any, ...], Any]:
    cases = [
        (name, fused, unscales, bad)
        for name in CLASSES
        for fused in (False, True)
        for unscales in (False, True)
        for bad in (SCALE, INF)
    ]
    return {case: one_step(rank, *case) for case in cases}


# ---------------------------------------------------------------- FSDP1 and DDP


FSDP1_SETTINGS: dict[str, dict[str, Any]] = {
    "full shard": {"sharding_strategy": ShardingStrategy.FULL_SHARD, "use_orig_params": False},
    "full shard, original parameters": {"sharding_strategy": ShardingStrategy.FULL_SHARD, "use_orig_params": True},
    "shard grad op, fp16": {
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
        "use_orig_params": True,
        "mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16),
    },
}


def parity(rank: int) -> dict[tuple[str, str], Any]:
    """Five steps under FSDP1 and under DDP, the third with an inf: in what one rank holds, in what all hold."""
    return {
        (name, settings): _train(rank, name, FSDP1_SETTINGS.get(settings))
        for name in ("ShardedGradScaler", "DistributedGradScaler")
        for settings in ("ddp", *FSDP1_SETTINGS)
    }


def _train(rank: int, name: str, settings: dict[str, Any] | None) -> tuple[list[tuple[float, bool]], list[Tensor]]:
    model: nn.Module = network()
    if settings is None:
        model = DistributedDataParallel(model)
    else:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **settings)
    optimizer = AdamW(model.parameters(), lr=0.05)
    scaler = scaler_of(name)
    steps = []
    for index in range(5):
        optimizer.zero_grad()
        scaler.scale(model(batch(rank, index)).float().square().mean()).backward()
        if index == 2 and (settings is None or rank == 1):
            grads = [param.grad for param in model.parameters() if param.grad is not None and param.grad.numel()]
            grads[0].view(-1)[0] = INF
        before = bits(optimizer)
        scaler.step(optimizer)
        scaler.update()
        steps.append((scaler.get_scale(), bits(optimizer) != before))
    if settings is None:
        return steps, [param.detach() for param in model.parameters()]
    with FullyShardedDataParallel.summon_full_params(model):
        return steps, [param.detach().clone() for param in model.parameters()]


# ---------------------------------------------------------------- FSDP2


def fsdp2(rank: int) -> dict[tuple[Any, ...], Any]:
    return {
        (name, has_inf, is_2d): _fsdp2(rank, name, has_inf, is_2d)
        for name in ("GradScaler", "DistributedGradScaler")
        for has_inf in (False, True)
        for is_2d in (False, True)
    }


def _sharded(model: nn.Module, is_2d: bool) -> nn.Module:
    if is_2d:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        dp_mesh = mesh["dp"]
    else:
        dp_mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=dp_mesh)
    return fully_shard(model, mesh=dp_mesh)


def _fsdp2(rank: int, name: str, has_inf: bool, is_2d: bool) -> dict[str, Any]:
    model = _sharded(network(), is_2d)
    optimizer = Adam(model.parameters(), lr=0.05)
    scaler = scaler_of(name)
    scaler.scale(model(batch(rank // 2 if is_2d else rank, 0)).square().mean()).backward()
    grad = local(next(model.parameters()).grad)  # type: ignore[arg-type]
    if has_inf and rank == 1:
        grad.view(-1)[0] = INF
    scaled = grad.clone()
    scaler.unscale_(optimizer)
    seen: dict[str, Any] = {
        "unscaled": flags(scaler, optimizer),
        "stage": scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED,
        "is_exact": torch.equal(local(next(model.parameters()).grad), scaled / SCALE),  # type: ignore[arg-type]
    }
    before = bits(optimizer)
    scaler.step(optimizer)
    seen |= {"stepped": flags(scaler, optimizer), "has_moved": bits(optimizer) != before, "state": len(optimizer.state)}
    scaler.update()
    return seen | {"scale": scaler.get_scale()}


# torch's Adafactor does not take DTensors: it squares a norm in place that is not reduced yet.
SHARDED_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "muon": lambda params: Muon(params, lr=0.05),
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
}


def sharded_optimizers(rank: int) -> dict[str, list[tuple[bool, bool, float]]]:
    """Beside the same optimizer without a scaler: on FSDP2 shards, some of them empty, with an inf on rank 3."""
    seen = {}
    for name, make in SHARDED_OPTIMIZERS.items():
        models = [_sharded(network(), is_2d=False) for _ in range(2)]
        optimizer, plain = (make([p for p in model.parameters() if p.ndim == 2]) for model in models)
        scaler = DistributedGradScaler("cpu", init_scale=SCALE)
        steps = []
        for index in range(5):
            for model in models:
                model.zero_grad()
            scaler.scale(models[0](batch(rank, index)).square().mean()).backward()
            is_bad = index in (0, 2)
            if is_bad:
                if rank == 3:
                    local(models[0][0].weight.grad).view(-1)[0] = INF  # type: ignore[index, union-attr]
            else:
                models[1](batch(rank, index)).square().mean().backward()
                plain.step()
            before = bits(optimizer)
            scaler.step(optimizer)
            scaler.update()
            steps.append((is_bad, bits(optimizer) == (before if is_bad else bits(plain)), scaler.get_scale()))
        seen[name] = steps
    return seen


CASES = [one_steps, parity, fsdp2, sharded_optimizers]


def run_all(rank: int) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """By case, what each rank saw."""
    by_rank = run_ranks(run_all, WORLD_SIZE, timeout_s=110.0)
    return {case.__name__: [seen[case.__name__] for seen in by_rank] for case in CASES}


@pytest.mark.parametrize("name", ["ShardedGradScaler", "DistributedGradScaler"])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("bad", [SCALE, INF])
def test_found_inf_is_agreed_on_cpu(results: dict[str, list[Any]], name: str, unscales: bool, bad: float) -> None:
    is_bad = bad != SCALE
    for seen in results["one_steps"]:
        mine = seen[name, False, unscales, bad]
        assert [flag > 0 for flag in mine["stepped"]] == [is_bad]
        assert (mine["has_moved"], mine["scale"]) == (not is_bad, SCALE / 2 if is_bad else SCALE)


def by_rank(results: dict[str, list[Any]], *case: Any) -> list[dict[str, Any]]:
    return [seen[case] for seen in results["one_steps"]]


def test_flag_between_unscaling_and_step_differs(results: dict[str, list[Any]]) -> None:
    for name, wanted in {
        "ShardedGradScaler": [1.0, 1.0, 1.0, 1.0],
        "DistributedGradScaler": [0.0, 0.0, 1.0, 0.0],  # its own; no exchange before the step
        "GradScaler": [0.0, 0.0, 1.0, 0.0],
    }.items():
        assert [seen["unscaled"] for seen in by_rank(results, name, False, True, INF)] == [[flag] for flag in wanted]


def test_who_skips_differs_from_grad_scaler(results: dict[str, list[Any]]) -> None:
    for fused in (False, True):
        for unscales in (False, True):
            theirs = by_rank(results, "GradScaler", fused, unscales, INF)
            assert [seen["has_moved"] for seen in theirs] == [True, True, False, True]
            assert [seen["scale"] for seen in theirs] == [SCALE, SCALE, SCALE / 2, SCALE]
            ours = by_rank(results, "DistributedGradScaler", fused, unscales, INF)
            assert [(seen["has_moved"], seen["scale"]) for seen in ours] == [(False, SCALE / 2)] * WORLD_SIZE


def test_fused_optimizer_that_was_not_unscaled_differs(results: dict[str, list[Any]]) -> None:
    # C3: ShardedGradScaler reduces in unscale_ alone, which a fused optimizer does not need.
    theirs = by_rank(results, "ShardedGradScaler", True, False, INF)
    assert [seen["has_moved"] for seen in theirs] == [True, True, False, True]
    for name in ("ShardedGradScaler", "DistributedGradScaler"):
        assert not any(seen["has_moved"] for seen in by_rank(results, name, True, True, INF))


@pytest.mark.parametrize("settings", FSDP1_SETTINGS)
@pytest.mark.parametrize("name", ["ShardedGradScaler", "DistributedGradScaler"])
def test_fsdp1_trains_as_ddp_does(results: dict[str, list[Any]], name: str, settings: str) -> None:
    is_fp16 = "fp16" in settings
    for seen in results["parity"]:
        (steps, params), (ddp_steps, ddp_params) = seen[name, settings], seen[name, "ddp"]
        assert steps == ddp_steps
        assert [scale for scale, _ in steps] == [SCALE, SCALE, *[SCALE / 2] * 3]
        assert [has_moved for _, has_moved in steps] == [True, True, False, True, True]
        mine = torch.cat([param.reshape(-1) for param in params])
        theirs = torch.cat([param.reshape(-1) for param in ddp_params])
        # FP16 gradients that differ in their last bits pass through Adam, which divides by their size.
        torch.testing.assert_close(mine, theirs, **({"rtol": 0.05, "atol": 0.05} if is_fp16 else {}))


@pytest.mark.parametrize("is_2d", [False, True])
@pytest.mark.parametrize("has_inf", [False, True])
@pytest.mark.parametrize("name", ["GradScaler", "DistributedGradScaler"])
def test_fsdp2(results: dict[str, list[Any]], name: str, has_inf: bool, is_2d: bool) -> None:
    for rank, by_case in enumerate(results["fsdp2"]):
        seen = by_case[name, has_inf, is_2d]
        assert seen["stage"]
        assert seen["is_exact"]
        assert seen["stepped"] == [float(has_inf)]
        assert seen["has_moved"] is not has_inf
        assert (seen["state"] == 0) is has_inf
        assert seen["scale"] == (SCALE / 2 if has_inf else SCALE)
        # Between unscaling and step: torch's flag is reduced over the mesh of the DTensors, ours is this rank's.
        is_mine = has_inf if name == "GradScaler" else has_inf and rank == 1
        assert seen["unscaled"] == [float(is_mine)]


@pytest.mark.parametrize("name", SHARDED_OPTIMIZERS)
def test_optimizers_on_shards(results: dict[str, list[Any]], name: str) -> None:
    for seen in results["sharded_optimizers"]:
        is_bad, is_right, scales = zip(*seen[name], strict=True)
        assert is_bad == (True, False, True, False, False)
        assert all(is_right)
        assert scales == (SCALE / 2, SCALE / 2, *[SCALE / 4] * 3)
