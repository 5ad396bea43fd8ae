"""The norm where ranks hold plain tensors: replicas are counted once, different tensors of one name each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import counted, results_by_case, run_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

WORLD_SIZE = 4
SCALE = 1024.0


def block(seed: int) -> nn.Sequential:
    """Weights that differ by ``seed``, and biases and norms that at the start do not."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)
    return model


def run_backward(model: nn.Module, seed: int) -> None:
    """Gradients that carry the scale; the same for the same model and seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator)
    (model(x).pow(3).mean() * SCALE).backward()


def square(params: Iterable[Tensor]) -> float:
    """Sum of the squares of this rank's own unscaled gradients, in float64."""
    grads = [param.grad for param in params]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads if grad is not None]
    return sum(float((grad.double() / SCALE).square().sum()) for grad in local)


def over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def measured(params: Iterable[Tensor], names: Any = None) -> float | None:
    """The norm that the scaler finds; parameters and gradients stay as they are."""
    params = list(params)
    grads = [param.grad.detach().clone() for param in params if param.grad is not None]
    scaler, _ = counted(init_scale=SCALE, max_norm=float("inf"), names=names)
    norm: float | None = run_step(scaler, AdamW(params, lr=0.0, weight_decay=0.0)).grad_norm
    for param, grad in zip((param for param in params if param.grad is not None), grads, strict=True):
        param.grad = grad
    return norm


def stages(rank: int) -> tuple[Any, Any]:
    """Four pipeline stages, whose tensors are called alike."""
    model = block(rank)
    run_backward(model, rank)
    return measured(model.parameters()), over_ranks(square(model.parameters())) ** 0.5


def stages_with_names(rank: int) -> tuple[Any, Any]:
    model = block(rank)
    run_backward(model, rank)
    return measured(model.parameters(), model), over_ranks(square(model.parameters())) ** 0.5


def replicated_stages(rank: int) -> tuple[Any, Any]:
    """Two stages, each on two ranks."""
    model = block(rank % 2)
    run_backward(model, rank % 2)
    return measured(model.parameters()), over_ranks(square(model.parameters()) / 2) ** 0.5


def sharded_stages(rank: int) -> tuple[Any, Any]:
    """Two stages, each sharded over two ranks by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = block(rank // 2)
    fully_shard(model, mesh=mesh["dp"])
    run_backward(model, 0)
    return measured(model.parameters(), model), over_ranks(square(model.parameters())) ** 0.5


def replicas(rank: int) -> tuple[Any, Any]:
    model = DistributedDataParallel(block(0))
    run_backward(model, rank)
    return measured(model.parameters()), square(model.parameters()) ** 0.5


class Experts(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense, self.experts = block(0), block(1 + rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.dense(x))


def local_experts(rank: int) -> tuple[Any, Any]:
    """A dense layer on all ranks, and one plain expert on each, all called alike."""
    model = Experts(rank)
    run_backward(model, rank)
    for param in model.dense.parameters():
        dist.all_reduce(param.grad)
    experts = over_ranks(square(model.experts.parameters()))
    return measured(model.parameters(), model), (experts + square(model.dense.parameters())) ** 0.5


def experts_on_submeshes(rank: int) -> tuple[Any, Any]:
    """Experts as DTensors over pairs of ranks; the pairs are replicas of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    expert = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh["ep"], [Shard(0)]))
    expert.grad = distribute_tensor(torch.randn(4, 6) * SCALE, mesh["ep"], [Shard(0)])
    return measured([expert]), (over_ranks(square([expert])) / 2) ** 0.5


# ---------------------------------------------------------------- equal at the start, and other gradients


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


def fsdp1_of_norms(rank: int, use_orig_params: bool) -> tuple[Any, Any]:
    """The root has the norms alone: each rank's piece of it is ones, or zeros."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(Normed(), Normed(), Normed(), Normed()),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=2000),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))
    (model(x).square().mean() * SCALE).backward()
    return measured(model.parameters(), model), over_ranks(square(model.parameters())) ** 0.5


def fsdp1_of_norms_flat(rank: int) -> tuple[Any, Any]:
    return fsdp1_of_norms(rank, False)


def fsdp1_of_norms_viewed(rank: int) -> tuple[Any, Any]:
    return fsdp1_of_norms(rank, True)


def zero_adapters(rank: int) -> tuple[Any, Any]:
    """LoRA's second matrix, sharded."""
    adapter = nn.Linear(8, 8)
    nn.init.zeros_(adapter.weight)
    nn.init.zeros_(adapter.bias)
    model = FullyShardedDataParallel(adapter, device_id=torch.device("cpu"))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    ((model(x) - x).square().mean() * SCALE).backward()
    return measured(model.parameters(), model), over_ranks(square(model.parameters())) ** 0.5


def stages_of_one_seed(rank: int) -> tuple[Any, Any]:
    model = block(0)
    run_backward(model, rank)
    return measured(model.parameters(), model), over_ranks(square(model.parameters())) ** 0.5


def upcycled_experts(rank: int) -> tuple[Any, Any]:
    """Two sets of experts that begin as copies of one layer, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    experts = block(0)
    fully_shard(experts, mesh=mesh["edp"])
    run_backward(experts, rank)
    return measured(experts.parameters(), experts), over_ranks(square(experts.parameters())) ** 0.5


def norms_stepped_first(rank: int) -> tuple[Any, Any]:
    """Pipeline stages, with an optimizer for norms and biases, which are all ones or zeros."""
    model = block(rank)
    run_backward(model, rank)
    params = [param for param in model.parameters() if param.ndim == 1]
    return measured(params, model), over_ranks(square(params)) ** 0.5


def replicas_apart_in_the_last_bits(rank: int) -> tuple[Any, Any]:
    """As the replicas of a checkpoint can be, and gradients that are computed apart."""
    model = block(0)
    run_backward(model, 0)
    for param in model.parameters():
        param.data *= 1 + rank * 2**-22
        param.grad *= 1 + rank * 2**-22
    return measured(model.parameters(), model), (over_ranks(square(model.parameters())) / WORLD_SIZE) ** 0.5


def looked_at_again(rank: int) -> dict[str, Any]:
    """Norms of stages whose first gradients overflow, do not come, or are zeros: later ones tell them apart."""
    seen: dict[str, Any] = {}
    for kind in ("inf", "nan", "none", "zero"):
        param = nn.Parameter(torch.ones(4))
        scaler, reducer = counted(init_scale=SCALE, max_norm=float("inf"), names={"norm": param})
        optimizer = AdamW([param], lr=0.0, weight_decay=0.0)
        norms, gathers = [], []
        for step in range(5):
            grad = torch.arange(1.0, 5.0).roll(rank) * (step + 1) * scaler.get_scale()
            if step < 2:
                bad = {"inf": float("inf"), "nan": float("nan"), "zero": 0.0}
                grad = torch.full((4,), bad[kind]) if kind in bad else None
            if step == 4:
                grad = torch.ones(4) * scaler.get_scale()  # equal ones at last change nothing
            param.grad = grad
            norms.append(run_step(scaler, optimizer).grad_norm)
            gathers.append(reducer.num_gathers)
        seen[kind] = norms[2:], len(set(gathers[2:]))
    return seen


def kept(rank: int) -> float:
    """What was told of the first optimizer holds when a second one comes, at whose step all gradients are equal."""
    params = {"stage": nn.Parameter(torch.ones(4)), "shared": nn.Parameter(torch.ones(4))}
    optimizers = [AdamW([param], lr=0.0, weight_decay=0.0) for param in params.values()]
    scaler, _ = counted(init_scale=SCALE, max_norm=float("inf"), names=params)
    params["stage"].grad = torch.arange(1.0, 5.0).roll(rank) * SCALE
    run_step(scaler, optimizers[0])
    for param in params.values():
        param.grad = torch.full((4,), SCALE)
    norm: float = run_step(scaler, *optimizers).grad_norm
    return norm


def one_without_a_gradient(rank: int) -> tuple[Any, Any]:
    """Norms of stages, at the first step of which one has none: it is no copy of another's."""
    param = nn.Parameter(torch.ones(4))
    if rank:
        param.grad = torch.arange(1.0, 5.0).roll(rank) * SCALE
    return measured([param], {"norm": param}), over_ranks(square([param])) ** 0.5


def never_told(rank: int) -> int:
    """A gradient that never comes: how often ranks look for it."""
    params = {"used": nn.Parameter(torch.ones(4)), "unused": nn.Parameter(torch.ones(4))}
    scaler, reducer = counted(init_scale=SCALE, max_norm=float("inf"), names=params)
    optimizer = AdamW(params.values(), lr=0.0, weight_decay=0.0)
    params["used"].grad = torch.ones(4)
    for _ in range(40):
        run_step(scaler, optimizer)
    return reducer.num_gathers


def fsdp1(rank: int) -> dict[str, tuple[Any, Any]]:
    """Flat parameters, and their views; sharded over all, replicated over pairs of two, or not sharded."""
    seen = {}
    mesh = init_device_mesh("cpu", (2, 2))
    for strategy, num_replicas in (("FULL_SHARD", 1), ("SHARD_GRAD_OP", 1), ("HYBRID_SHARD", 2), ("NO_SHARD", 4)):
        for use_orig_params in (True, False):
            for inner in (block(0), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))):
                model = FullyShardedDataParallel(
                    inner,
                    sharding_strategy=ShardingStrategy[strategy],
                    use_orig_params=use_orig_params,
                    device_id=torch.device("cpu"),
                    device_mesh=mesh if strategy == "HYBRID_SHARD" else None,
                )
                run_backward(model, rank)
                wanted = (over_ranks(square(model.parameters())) / num_replicas) ** 0.5
                for names in (None, model):
                    key = f"{strategy} use_orig_params={use_orig_params} names={names is not None} {len(inner)}"
                    seen[key] = measured(model.parameters(), names), wanted
    return seen


CASES: list[Callable[[int], Any]] = [
    stages,
    stages_with_names,
    replicated_stages,
    sharded_stages,
    replicas,
    local_experts,
    experts_on_submeshes,
    fsdp1_of_norms_flat,
    fsdp1_of_norms_viewed,
    zero_adapters,
    stages_of_one_seed,
    upcycled_experts,
    norms_stepped_first,
    replicas_apart_in_the_last_bits,
    one_without_a_gradient,
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case([*CASES, fsdp1, looked_at_again, kept, never_told], WORLD_SIZE)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_norm(results: dict[str, list[Any]], case: str) -> None:
    for norm, wanted in results[case]:
        assert norm == pytest.approx(wanted, rel=1e-6)


def test_norm_under_fsdp1(results: dict[str, list[Any]]) -> None:
    for seen in results["fsdp1"]:
        norms = {key: norm for key, (norm, _) in seen.items()}
        assert norms == pytest.approx({key: wanted for key, (_, wanted) in seen.items()}, rel=1e-6)


@pytest.mark.parametrize("kind", ["inf", "nan", "none", "zero"])
def test_the_first_gradients_that_are_there_tell(results: dict[str, list[Any]], kind: str) -> None:
    square = 1 + 4 + 9 + 16
    for norms, num_gathers in (seen[kind] for seen in results["looked_at_again"]):
        assert norms == pytest.approx([(WORLD_SIZE * square * 9) ** 0.5, (WORLD_SIZE * square * 16) ** 0.5, 4.0])
        assert num_gathers == 1


def test_ranks_do_not_look_for_ever(results: dict[str, list[Any]]) -> None:
    assert results["never_told"] == [32] * WORLD_SIZE


def test_what_was_told_is_kept(results: dict[str, list[Any]]) -> None:
    assert results["kept"] == [pytest.approx((WORLD_SIZE * 4 + 4) ** 0.5, rel=1e-6)] * WORLD_SIZE
