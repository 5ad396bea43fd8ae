"""One decision, the right norm and the right clipping on every layout: hybrid, tensor and expert parallel, mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    OPTIMIZERS,
    counted,
    error_of,
    full_norm,
    local,
    poison,
    results_by_case,
    run_step,
    snapshot,
    tiny_model,
)
from layout_models import Mlp, sequence_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

WORLD_SIZE = 4
SCALE = 1024.0
MAX_NORM = 0.25


def observe(make: Callable[[], tuple[Optimizer, Any]], poisoned: dict[str, list[int]]) -> dict[str, Any]:
    """One clean step, compared with the full gradient, and then one for each poisoned tensor and rank.

    Args:
        make: returns an optimizer whose gradients are there, scaled by ``SCALE``, and the (name, parameter) pairs.
        poisoned: ranks to poison, by tensor.
    """
    optimizer, named = make()
    named = dict(named)
    scaler, reducer = counted(init_scale=SCALE, names=named, max_norm=MAX_NORM)
    saved = scaler.state_dict()
    clean = {name: local(param.grad).clone() for name, param in named.items() if param.grad is not None}
    reference = full_norm(list(named.values())) / SCALE
    report = run_step(scaler, optimizer)
    wanted_coef = min(1.0, MAX_NORM / (reference + 1e-6))
    clipped = {name: clean[name] * (wanted_coef / SCALE) for name in clean}
    seen: dict[str, Any] = {
        "norm": (report.grad_norm, reference),
        "coef": (report.clip_coef, wanted_coef),
        "clipped": all(torch.allclose(local(named[name].grad), clipped[name], rtol=1e-5, atol=0) for name in clean),
        "skipped": report.skipped,
        "faults": {},
    }
    before = snapshot(optimizer)
    for bad_name, ranks in poisoned.items():
        for bad_rank in ranks:
            for name, values in clean.items():
                local(named[name].grad).copy_(values)
            if dist.get_rank() == bad_rank:
                poison(named[bad_name].grad, float("inf"))
            scaler.load_state_dict(saved)
            report = run_step(scaler, optimizer)
            culprit = report.culprit and (report.culprit.rank, report.culprit.tensor)
            seen["faults"][bad_name, bad_rank] = (
                report.skipped,
                scaler.get_scale(),
                culprit == (bad_rank, bad_name),
                snapshot(optimizer) == before,
            )
    seen["exchanges"] = reducer.num_reduces == 1 + len(seen["faults"])
    return seen


def torch_grad_scaler(make: Callable[[], tuple[Optimizer, Any]], bad_name: str, bad_rank: int) -> Any:
    """For comparison: what torch.amp.GradScaler does with the same gradients; (skipped, scale) or its error."""
    optimizer, named = make()
    if dist.get_rank() == bad_rank:
        poison(dict(named)[bad_name].grad, float("inf"))
    before = snapshot(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return error_of(step)[1] or (snapshot(optimizer) == before, scaler.get_scale())


# ---------------------------------------------------------------- dense layouts


def wrapped(layout: str, fused: bool = False) -> tuple[Optimizer, Any]:
    inner = tiny_model()
    model: nn.Module = inner
    if layout == "ddp":
        model = DistributedDataParallel(inner)
    else:
        shape, names = {"fsdp2": ((4,), ("shard",)), "hsdp": ((2, 2), ("replicate", "shard"))}[layout]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(inner[0], mesh=mesh)
        fully_shard(inner, mesh=mesh)
    x = torch.linspace(-1.0, 1.0 + dist.get_rank(), 20).view(5, 4)
    (model(x).square().mean() * SCALE).backward()
    return AdamW(inner.parameters(), lr=1e-2, fused=fused), inner.named_parameters()


def fused(rank: int) -> dict[str, Any]:
    """C3's like: a fused optimizer and no explicit ``unscale_``, an inf on each rank in turn; (skipped, scale)."""
    seen: dict[str, Any] = {}
    for layout in ("ddp", "fsdp2"):
        faults = []
        for bad_rank in range(WORLD_SIZE):
            optimizer, named = wrapped(layout, fused=True)
            named = dict(named)
            scaler, _ = counted(init_scale=SCALE, names=named)
            run_step(scaler, optimizer)
            if rank == bad_rank:
                poison(named["0.weight"].grad, float("inf"))
            before = snapshot(optimizer)
            report = run_step(scaler, optimizer)
            faults.append((report.skipped, scaler.get_scale(), snapshot(optimizer) == before))
        seen[layout] = faults
        seen[f"torch, {layout}"] = torch_grad_scaler(lambda layout=layout: wrapped(layout, fused=True), "0.weight", 1)
    return seen


def dense(rank: int) -> dict[str, Any]:
    # Under hybrid sharding, both replicas of a shard hold the gradient; the last tensor's one row is on the first.
    poisoned = {
        "ddp": {"0.weight": [0, 3], "3.bias": [1]},
        "fsdp2": {"0.weight": [0, 3], "2.bias": [1], "3.bias": [0]},
        "hsdp": {"0.weight": [0, 1, 2, 3], "3.bias": [0, 2]},
    }
    return {layout: observe(lambda layout=layout: wrapped(layout), faults) for layout, faults in poisoned.items()}


# ---------------------------------------------------------------- tensor parallel


def tensor_parallel(norms_first: bool) -> tuple[Optimizer, Any]:
    """FSDP2 x TP on a 2x2 mesh, sequence parallel, the norms replicated over TP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sequence_parallel(Mlp(seed=0), mesh)
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    x = torch.linspace(-1.0, 1.0 + dp, 2 * 6 * 8).sin().view(2, 6, 8)
    (model(x.chunk(2, dim=1)[tp]).square().sum() * SCALE).backward()
    norms = [param for name, param in model.named_parameters() if name.startswith("norm")]
    weights = [param for name, param in model.named_parameters() if not name.startswith("norm")]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": weights}]
    optimizer = AdamW(groups if norms_first else groups[::-1], lr=1e-2, foreach=False)
    return optimizer, list(model.named_parameters())


def c1(rank: int) -> dict[str, Any]:
    poisoned = {"up.weight": [0, 1, 2, 3], "norm.weight": [1, 2], "down.bias": [3]}
    return {
        "norms first": observe(lambda: tensor_parallel(True), poisoned),
        "norms last": observe(lambda: tensor_parallel(False), poisoned),
        "torch, norms first": torch_grad_scaler(lambda: tensor_parallel(True), "up.weight", 1),
        "torch, norms last": torch_grad_scaler(lambda: tensor_parallel(False), "up.weight", 1),
    }


# ---------------------------------------------------------------- expert parallel


def dense_and_experts(kind: str, experts_first: bool = False) -> tuple[Optimizer, Any]:
    """A dense layer sharded over all ranks, and experts on another mesh."""
    inner = nn.ModuleDict({"dense": nn.Linear(4, 6)})
    torch.manual_seed(1)
    inner["dense"].weight = nn.Parameter(torch.randn(6, 4))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    fully_shard(inner["dense"], mesh=everyone)
    x = torch.linspace(-1.0, 1.0 + dist.get_rank(), 20).view(5, 4)
    (inner["dense"](x).square().mean() * SCALE).backward()
    named = [(f"dense.{name}", param) for name, param in inner["dense"].named_parameters()]
    mesh2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    mesh, placements = {
        "2x2": (mesh2d, [Shard(1), Shard(0)]),
        "replicated": (mesh2d, [Replicate(), Shard(0)]),
        "axis": (mesh2d["ep"], [Shard(0)]),
        "last two ranks": (DeviceMesh("cpu", [2, 3]), [Shard(0)]),
    }[kind]
    value = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    expert = nn.Parameter(distribute_tensor(value, mesh, placements))  # empty on a rank outside the mesh
    if mesh.get_coordinate() is not None:
        expert.grad = distribute_tensor(value.cos() * SCALE, mesh, placements)
    named.insert(0 if experts_first else len(named), ("expert", expert))
    return AdamW([param for _, param in named], lr=1e-2, foreach=False), named


def c2(rank: int) -> dict[str, Any]:
    ranks = {"2x2": [0, 1, 2, 3], "replicated": [1, 2], "axis": [0, 1, 2, 3]}
    seen: dict[str, Any] = {
        kind: observe(lambda kind=kind: dense_and_experts(kind), {"expert": ranks[kind], "dense.weight": [0, 2]})
        for kind in ranks
    }
    seen["experts first"] = observe(lambda: dense_and_experts("axis", experts_first=True), {"expert": [1]})
    seen["torch, experts first"] = torch_grad_scaler(lambda: dense_and_experts("axis", True), "expert", 1)
    seen["torch, dense first"] = torch_grad_scaler(lambda: dense_and_experts("axis"), "expert", 1)

    # Ranks 0 and 1 hold no part of the experts at all, so the full norm is put together here by hand.
    optimizer, named = dense_and_experts("last two ranks")
    scaler, _ = counted(init_scale=SCALE, names=dict(named), max_norm=MAX_NORM)
    squares = torch.tensor(0.0, dtype=torch.float64)
    for _, param in named:
        if param.grad is not None:
            squares += local(param.grad).double().square().sum()
    dist.all_reduce(squares)
    report = run_step(scaler, optimizer)
    faults = {}
    for bad_rank in (2, 3):
        before = snapshot(optimizer)
        if rank == bad_rank:
            poison(dict(named)["expert"].grad, float("nan"))
        fault = run_step(scaler, optimizer)
        faults[bad_rank] = (fault.skipped, fault.culprit.tensor, snapshot(optimizer) == before, scaler.get_scale())
    seen["last two ranks"] = (report.grad_norm, float(squares.sqrt()) / SCALE, report.skipped, faults)
    return seen


# ---------------------------------------------------------------- plain next to sharded, missing, empty


def plain_and_sharded() -> tuple[Optimizer, Any]:
    inner = tiny_model()
    ignored = {inner[3].weight, inner[3].bias}
    fully_shard(inner, mesh=init_device_mesh("cpu", (4,)), ignored_params=ignored)
    x = torch.linspace(-1.0, 1.0, 20).view(5, 4)  # equal on all ranks, so that the ignored gradients are, too
    (inner(x).square().mean() * SCALE).backward()
    return AdamW(inner.parameters(), lr=1e-2, foreach=False), inner.named_parameters()


def c5(rank: int) -> dict[str, Any]:
    return {
        "distscale": observe(plain_and_sharded, {"3.weight": [0, 1, 2, 3], "0.weight": [2]}),
        "torch": torch_grad_scaler(plain_and_sharded, "3.weight", 1),
    }


def partial() -> tuple[Optimizer, Any]:
    """A replicated parameter whose gradient still waits for its sum over one mesh axis, next to a sharded one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.linspace(-1.0, 1.0, 8)
    params = {
        "pending": nn.Parameter(distribute_tensor(value, mesh, [Replicate(), Replicate()])),
        "sharded": nn.Parameter(distribute_tensor(value, mesh, [Shard(0), Replicate()])),
    }
    own = value * (1 + mesh.get_local_rank("tp")) * SCALE
    params["pending"].grad = DTensor.from_local(own, mesh, [Replicate(), Partial()])
    params["sharded"].grad = distribute_tensor(value * SCALE, mesh, [Shard(0), Replicate()])
    return AdamW(params.values(), lr=1e-2, foreach=False), params


def pending_sums(rank: int) -> dict[str, Any]:
    """The norm is that of the sum; a bad value in one summand is bad in the sum, on both ranks that hold it."""
    seen: dict[str, Any] = {"clean": [], "bad": []}
    for bad_rank in (None, 0, 1, 2, 3):
        optimizer, params = partial()
        scaler, reducer = counted(init_scale=SCALE, names=params, max_norm=MAX_NORM)
        if rank == bad_rank:
            poison(params["pending"].grad, float("inf"))
        before = snapshot(optimizer)
        report = run_step(scaler, optimizer)
        if bad_rank is None:
            seen["clean"] = (report.skipped, report.grad_norm, reducer.num_reduces)
        else:
            culprit = (report.culprit.rank // 2, report.culprit.tensor)
            seen["bad"].append((report.skipped, culprit, scaler.get_scale(), snapshot(optimizer) == before))
    return seen


def c6(rank: int) -> dict[str, Any]:
    return {kind: _c6(rank, kind) for kind in ("adamw-loop", "adamw-fused")}


def _c6(rank: int, kind: str) -> dict[str, Any]:
    """Plain processes: rank 1 has no gradients, rank 2 neither loss nor optimizer, rank 3 no fp16 tensors."""
    params = {
        "wide": nn.Parameter(torch.ones(3)),
        "narrow": nn.Parameter(torch.ones(3, dtype=torch.float16)),
    }
    if rank == 3:
        del params["narrow"]
    for param in params.values() if rank in (0, 3) else []:
        param.grad = torch.full_like(param, 2.0)
    optimizer = OPTIMIZERS[kind](params.values())
    scaler, reducer = counted(init_scale=2.0, names=None if rank == 2 else params, max_norm=100.0)
    seen = []
    for bad_rank, bad_name in ((None, None), (0, "narrow"), (0, "wide"), (3, "wide")):
        for param in params.values():
            if param.grad is not None:
                param.grad.fill_(2.0)
        if rank == bad_rank:
            poison(params[bad_name].grad, float("nan"))
        before = snapshot(optimizer)
        if rank != 2:
            scaler.scale(torch.ones(()))
        scaler.step(*([] if rank == 2 else [optimizer]))
        scaler.update()
        report = scaler.last_step
        assert report is not None
        culprit = report.culprit and (report.culprit.rank, report.culprit.tensor, report.culprit.kind)
        seen.append((report.skipped, culprit, scaler.get_scale()))
        seen.append(snapshot(optimizer) == before)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    torch_scaler.scale(torch.ones(()))
    return {
        "seen": seen,
        "counts": (reducer.num_reduces, reducer.reduced_bytes),
        "torch": error_of(lambda: torch_scaler.step(optimizer)) if rank != 0 else None,
    }


# ---------------------------------------------------------------- which ranks decide together


def groups(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    choices: dict[str, Any] = {
        "default": None,
        "pair": pairs[rank // 2],
        "whole mesh": mesh,
        "axis": mesh["dp"],
        "two axes of three": cube["b", "c"],
    }
    seen: dict[str, Any] = {}
    for name, group in choices.items():
        param = nn.Parameter(torch.ones(3))
        param.grad = torch.full((3,), float("inf") if rank == 0 else 2.0)
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler, _ = counted(init_scale=2.0, process_group=group)
        report = run_step(scaler, optimizer)
        seen[name] = (report.skipped, scaler.get_scale(), param.tolist())
    seen["foreign"] = error_of(lambda: counted(process_group=pairs[1 - rank // 2]))
    return seen


CASES = [dense, fused, c1, c2, c5, c6, pending_sums, groups]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


def check(by_rank: list[dict[str, Any]], num_faults: int) -> None:
    """What :func:`observe` must have seen on all ranks."""
    for seen in by_rank:
        norm, reference = seen["norm"]
        coef, wanted_coef = seen["coef"]
        assert reference > MAX_NORM
        assert norm == pytest.approx(reference, rel=1e-6)
        assert coef == pytest.approx(wanted_coef, rel=1e-6)
        assert seen["clipped"]
        assert not seen["skipped"]
        assert len(seen["faults"]) == num_faults
        for fault, outcome in seen["faults"].items():
            assert outcome == (True, SCALE / 2, True, True), fault
        assert seen["exchanges"]
    assert len({(seen["norm"][0], seen["coef"][0]) for seen in by_rank}) == 1


@pytest.mark.parametrize(("layout", "num_faults"), [("ddp", 3), ("fsdp2", 4), ("hsdp", 6)])
def test_dense(results: dict[str, list[Any]], layout: str, num_faults: int) -> None:
    check([seen[layout] for seen in results["dense"]], num_faults)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_fused_without_unscale(results: dict[str, list[Any]], layout: str) -> None:
    for seen in results["fused"]:
        assert seen[layout] == [(True, SCALE / 2, True)] * WORLD_SIZE


def test_fused_torch_decides_alone_on_plain_tensors(results: dict[str, list[Any]]) -> None:
    """Not our code: an inf that only rank 1 has. Under FSDP2 torch reduces the flag, also for a fused optimizer."""
    assert [seen["torch, ddp"][1] for seen in results["fused"]] == [SCALE, SCALE / 2, SCALE, SCALE]
    assert [seen["torch, fsdp2"][1] for seen in results["fused"]] == [SCALE / 2] * 4


@pytest.mark.parametrize("order", ["norms first", "norms last"])
def test_c1_norms_replicated_over_tensor_parallel_ranks(results: dict[str, list[Any]], order: str) -> None:
    check([seen[order] for seen in results["c1"]], 7)


def test_c1_torch_splits_the_ranks(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about. (skipped, scale) by rank."""
    stepped, skipped = (False, SCALE), (True, SCALE / 2)
    assert [seen["torch, norms first"] for seen in results["c1"]] == [stepped, skipped, stepped, skipped]
    assert [seen["torch, norms last"] for seen in results["c1"]] == [skipped] * 4


@pytest.mark.parametrize(("kind", "num_faults"), [("2x2", 6), ("replicated", 4), ("axis", 6), ("experts first", 1)])
def test_c2_experts_on_another_mesh(results: dict[str, list[Any]], kind: str, num_faults: int) -> None:
    check([seen[kind] for seen in results["c2"]], num_faults)


def test_c2_experts_on_two_ranks_only(results: dict[str, list[Any]]) -> None:
    for norm, reference, skipped, faults in (seen["last two ranks"] for seen in results["c2"]):
        assert norm == pytest.approx(reference, rel=1e-6)
        assert not skipped
        assert faults == {2: (True, "expert", True, SCALE / 2), 3: (True, "expert", True, SCALE / 4)}


def test_c2_torch_splits_the_ranks(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about. (skipped, scale) by rank.

    The flag is reduced over the mesh of the first gradient: of the experts, two ranks; of the dense layer, all.
    """
    stepped, skipped = (False, SCALE), (True, SCALE / 2)
    assert [seen["torch, experts first"] for seen in results["c2"]] == [skipped, skipped, stepped, stepped]
    assert [seen["torch, dense first"] for seen in results["c2"]] == [skipped] * 4


def test_c5_plain_tensors_next_to_sharded_ones(results: dict[str, list[Any]]) -> None:
    check([seen["distscale"] for seen in results["c5"]], 5)


def test_c5_torch_refuses(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about."""
    for seen in results["c5"]:
        assert "got mixed torch.Tensor and DTensor" in seen["torch"]


@pytest.mark.parametrize("kind", ["adamw-loop", "adamw-fused"])
def test_c6_ranks_without_gradients(results: dict[str, list[Any]], kind: str) -> None:
    for rank, seen in enumerate(by_kind[kind] for by_kind in results["c6"]):
        wanted = [None, (0, "narrow", "nan"), (0, "wide", "nan"), (3, "wide", "nan")]
        decisions, untouched = seen["seen"][::2], seen["seen"][1::2]
        assert [culprit for _, culprit, _ in decisions] == wanted
        assert [skipped for skipped, _, _ in decisions] == [False, True, True, True]
        assert [scale for _, _, scale in decisions] == [2.0, 1.0, 0.5, 0.25]
        assert untouched == [rank in (1, 2), True, True, True]
        num_reduces, reduced_bytes = seen["counts"]
        assert num_reduces == 4
        assert reduced_bytes == results["c6"][0][kind]["counts"][1]


def test_c6_torch_fails_on_the_rank_without_gradients_alone(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about."""
    errors = [seen["adamw-loop"]["torch"] for seen in results["c6"]]
    assert [error and error[0] for error in errors] == [None, "AssertionError", "AssertionError", ""]


def test_gradients_that_wait_for_their_sum(results: dict[str, list[Any]]) -> None:
    value = torch.linspace(-1.0, 1.0, 8, dtype=torch.float64)
    norm = float(((3 * value).square().sum() + value.square().sum()).sqrt())
    for seen in results["pending_sums"]:
        assert seen["clean"] == (False, pytest.approx(norm, rel=1e-6), 1)
        # Both tensor-parallel ranks of a pair hold the sum; the report names one of them.
        assert seen["bad"] == [(True, (bad_rank // 2, "pending"), SCALE / 2, True) for bad_rank in range(4)]


def test_ranks_that_decide_together(results: dict[str, list[Any]]) -> None:
    skips = (True, 1.0, [1.0, 1.0, 1.0])
    steps = (False, 2.0, [0.5, 0.5, 0.5])
    wanted = {
        "default": [skips] * 4,
        "pair": [skips, skips, steps, steps],
        "whole mesh": [skips] * 4,
        "axis": [skips, steps, skips, steps],
        "two axes of three": [skips, skips, steps, steps],
    }
    for name, by_rank in wanted.items():
        assert [seen[name] for seen in results["groups"]] == by_rank, name
    for rank, seen in enumerate(results["groups"]):
        kind, text = seen["foreign"]
        assert kind == "ConfigError"
        assert f"rank {rank} is not in the process_group" in text
