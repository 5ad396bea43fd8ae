"""The norm where ranks hold plain tensors: replicas are counted once, different tensors of one name each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import counted, results_by_case, run_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
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
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case([*CASES, fsdp1], WORLD_SIZE)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_norm(results: dict[str, list[Any]], case: str) -> None:
    for norm, wanted in results[case]:
        assert norm == pytest.approx(wanted, rel=1e-6)


def test_norm_under_fsdp1(results: dict[str, list[Any]]) -> None:
    for seen in results["fsdp1"]:
        norms = {key: norm for key, (norm, _) in seen.items()}
        assert norms == pytest.approx({key: wanted for key, (_, wanted) in seen.items()}, rel=1e-6)
