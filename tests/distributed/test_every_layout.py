"""One decision on the layouts that people train with: inf, -inf and NaN on every rank in turn, and a clean step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import BAD_VALUES, counted, full_norm, local, poison, results_by_case, run_step, snapshot
from layout_models import (
    Attention,
    Mlp,
    Stage,
    block,
    context_parallel_backward,
    let_fsdp1_offload,
    sequence_parallel,
    tensor_parallel,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.torch_version import TorchVersion

SCALE = 1024.0
MAX_NORM = 2.0**-10
"""Below the norm on every layout."""
CPU = torch.device("cpu")


class Layout(NamedTuple):
    """A model on this rank, and how its gradients come about."""

    params: list[nn.Parameter]
    backward: Callable[[Any], None]
    """Given the scaler."""
    num_copies: int = 1
    """How many ranks hold each gradient, or, of a plain tensor, each piece of it."""


def norm_over_ranks(layout: Layout) -> float:
    """Of the whole gradients as they are, in float64."""
    total = torch.tensor(full_norm(layout.params) ** 2, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total / layout.num_copies) ** 0.5


def observe(layout: Layout, names: Any = None) -> dict[str, Any]:
    """A clean backward pass through the scaler, then its gradients with one bad value on each rank in turn."""
    scaler, reducer = counted(init_scale=SCALE, max_norm=MAX_NORM, names=names)
    optimizer = AdamW(layout.params, lr=1e-2)
    layout.backward(scaler)
    clean = {param: copied(param.grad) for param in layout.params if param.grad is not None}
    seen: dict[str, Any] = {"norm": norm_over_ranks(layout) / SCALE, "faults": []}
    before = snapshot(optimizer)
    saved = scaler.state_dict()
    held = [param for param, grad in reversed(clean.items()) if local(grad).numel()]
    has_values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(has_values, bool(held))
    for kind, value in BAD_VALUES.items():
        for bad_rank in (rank for rank, has in enumerate(has_values) if has):
            restore(clean)
            if dist.get_rank() == bad_rank:
                poison(held[0].grad, value)
            scaler.step(optimizer)
            report = scaler.last_step
            scaler.update()
            culprit = report.culprit
            seen["faults"].append({
                "fault": (kind, bad_rank),
                "skipped": report.skipped,
                "culprit": culprit and (culprit.kind, culprit.rank),
                "scale": scaler.get_scale(),
                "untouched": snapshot(optimizer) == before,
            })  # fmt: skip
            scaler.load_state_dict(saved)
            scaler.scale(torch.ones(()))  # this rank's gradients, or those of others, carry the scale
    restore(clean)
    report = run_step(scaler, optimizer)
    seen["clean"] = report.skipped, report.grad_norm, snapshot(optimizer) != before
    seen["clipped to"] = norm_over_ranks(layout)
    seen["exchanges"] = reducer.num_reduces - len(seen["faults"])
    return seen


def restore(grads: Mapping[nn.Parameter, Tensor]) -> None:
    for param, grad in grads.items():
        param.grad = copied(grad)


def copied(grad: Tensor) -> Tensor:
    """A copy in which sums are pending as they are in ``grad``; ``clone`` forms them."""
    if not isinstance(grad, DTensor):
        return grad.clone()
    values = grad.to_local().clone()
    return DTensor.from_local(
        values, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape, stride=grad.stride()
    )


def check(by_rank: list[dict[str, Any]], num_poisoned: int) -> None:
    for seen in by_rank:
        for fault in seen["faults"]:
            kind, bad_rank = fault["fault"]
            wanted = {"skipped": True, "culprit": (kind.lstrip("-"), bad_rank), "scale": SCALE / 2, "untouched": True}
            assert fault == {"fault": (kind, bad_rank), **wanted}
        assert len(seen["faults"]) == 3 * num_poisoned
        skipped, norm, has_stepped = seen["clean"]
        assert not skipped
        assert has_stepped
        assert norm == pytest.approx(seen["norm"], rel=1e-6)
        assert norm > 2 * MAX_NORM
        assert seen["clipped to"] == pytest.approx(MAX_NORM * norm / (norm + 1e-6), rel=1e-6)  # as torch clips
        assert seen["exchanges"] == 1


def run_backward(model: nn.Module, scaler: Any, seed: int, width: int = 8) -> None:
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(seed))
    scaler.scale(model(x).pow(2).mean()).backward()


# ---------------------------------------------------------------- FSDP1


def fsdp1_layout(
    strategy: str = "FULL_SHARD", use_orig_params: bool = True, *, accumulate: bool = False, offload: bool = False
) -> Layout:
    if offload:
        let_fsdp1_offload()
    mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    model = FullyShardedDataParallel(
        block(),
        sharding_strategy=Strategy[strategy],
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=offload),
        device_id=CPU,
        device_mesh=mesh,
    )
    assert model._handle is not None
    assert model._handle._offload_params == offload

    def backward(scaler: Any) -> None:
        with model.no_sync() if accumulate else nullcontext():
            run_backward(model, scaler, dist.get_rank())
        if accumulate:
            run_backward(model, scaler, 10 + dist.get_rank())

    return Layout(list(model.parameters()), backward, 2 if mesh else 1)


FSDP1: Mapping[str, Callable[[], Layout]] = {
    **{
        f"{strategy}, use_orig_params={use_orig_params}": lambda strategy=strategy, use=use_orig_params: fsdp1_layout(
            strategy, use
        )
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
        for use_orig_params in (False, True)
    },
    "no_sync": lambda: fsdp1_layout(accumulate=True),
    "CPU offload, use_orig_params=False": lambda: fsdp1_layout(use_orig_params=False, offload=True),
    "CPU offload, use_orig_params=True": lambda: fsdp1_layout(offload=True),
    "CPU offload, HYBRID_SHARD, no_sync": lambda: fsdp1_layout("HYBRID_SHARD", accumulate=True, offload=True),
}


def fsdp1(rank: int) -> dict[str, Any]:
    return {name: observe(make()) for name, make in FSDP1.items()}


# ---------------------------------------------------------------- FSDP2


def fsdp2_layout(*, reshard: bool = True, offload: bool = False, accumulate: bool = False, width: int = 8) -> Layout:
    """With a width of 3, the second and third rank have one row, and the last has none."""
    model = block(width=width)
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard, **policy)
    fully_shard(model, reshard_after_forward=reshard, **policy)

    def backward(scaler: Any) -> None:
        model.set_requires_gradient_sync(not accumulate)
        run_backward(model, scaler, dist.get_rank(), width)
        if accumulate:
            model.set_requires_gradient_sync(True)
            run_backward(model, scaler, 10 + dist.get_rank(), width)

    return Layout(list(model.parameters()), backward, dist.get_world_size())


FSDP2: Mapping[str, Callable[[], Layout]] = {
    "resharded": fsdp2_layout,
    "not resharded": lambda: fsdp2_layout(reshard=False),
    "empty shards": lambda: fsdp2_layout(width=3),
    "CPU offload": lambda: fsdp2_layout(offload=True),
    "accumulated": lambda: fsdp2_layout(accumulate=True),
}


def fsdp2(rank: int) -> dict[str, Any]:
    return {name: observe(make()) for name, make in FSDP2.items()}


# ---------------------------------------------------------------- all other kinds of parallelism


def ddp_layout() -> Layout:
    model = DistributedDataParallel(block())
    return Layout(list(model.parameters()), lambda scaler: run_backward(model, scaler, dist.get_rank()), 4)


def hsdp_layout() -> Layout:
    model = fully_shard(block(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return Layout(list(model.parameters()), lambda scaler: run_backward(model, scaler, dist.get_rank()), 4)


def tensor_parallel_layout(norms_first: bool) -> Layout:
    """FSDP2 and TP on a 2x2 mesh; the norm is no DTensor of TP, but held whole by its ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(block(), mesh)
    params = sorted(model.parameters(), key=lambda param: (param.ndim == 2) is norms_first)
    return Layout(params, lambda scaler: run_backward(model, scaler, mesh.get_local_rank("dp")), 4)


def sequence_parallel_layout(*, with_fsdp2: bool) -> Layout:
    """Each rank has its part of every sequence; the gradients of the norms are sums of the parts'.

    Without FSDP2, these sums are pending when the backward pass ends, and are formed in ``step``.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sequence_parallel(Mlp(seed=0), mesh, with_fsdp2=with_fsdp2)

    def backward(scaler: Any) -> None:
        seed = mesh.get_local_rank("dp") if with_fsdp2 else 0
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed))
        scaler.scale(model(x.chunk(2, dim=1)[mesh.get_local_rank("tp")]).square().mean()).backward()

    return Layout(sorted(model.parameters(), key=lambda param: param.ndim), backward, 4)


def expert_parallel_layout() -> Layout:
    """A dense layer sharded over all ranks, and experts sharded over pairs of ranks, which are replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dense = fully_shard(block(), mesh=init_device_mesh("cpu", (4,)))
    torch.manual_seed(1)
    experts = nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh["ep"], [Shard(0)]))

    def backward(scaler: Any) -> None:
        run_backward(dense, scaler, dist.get_rank())
        scaler.scale(experts.full_tensor().square().sum()).backward()

    return Layout([*dense.parameters(), experts], backward, 4)


OTHERS: Mapping[str, Callable[[], Layout]] = {
    "DDP": ddp_layout,
    "HSDP": hsdp_layout,
    "FSDP2 with TP, norms first": lambda: tensor_parallel_layout(True),
    "FSDP2 with TP, norms last": lambda: tensor_parallel_layout(False),
    "sequence parallel with FSDP2": lambda: sequence_parallel_layout(with_fsdp2=True),
    "sequence parallel, plain": lambda: sequence_parallel_layout(with_fsdp2=False),
    "experts": expert_parallel_layout,
}


def others(rank: int) -> dict[str, Any]:
    return {name: observe(make()) for name, make in OTHERS.items()}


def context_parallel(rank: int) -> dict[str, Any]:
    """Two ranks have a part of every sequence each, and the gradients are reduced with those of other sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(0))  # axes: dp, batch, sequence, width
    whole = Attention(seed=0).double()
    whole(x.flatten(0, 1).double()).square().mean().backward()
    wanted = full_norm(list(whole.parameters()))
    seen = {}
    for kind in ("DDP", "FSDP2"):
        model: nn.Module = Attention(seed=0)
        model = DistributedDataParallel(model) if kind == "DDP" else fully_shard(model, mesh=mesh._flatten())

        def backward(scaler: Any, model: nn.Module = model) -> None:
            context_parallel_backward(model, scaler.scale, x[mesh.get_local_rank("dp")], mesh["cp"])

        seen[kind] = {**observe(Layout(list(model.parameters()), backward, 4)), "norm of the whole": wanted}
    return seen


def pipeline_layout(schedule: Any, models: Mapping[int, nn.Module], num_stages: int, group: Any, copies: int) -> Layout:
    """The schedule runs the backward pass, so the loss is scaled in its loss function, on the last stage alone.

    Args:
        models: of this rank, by stage; one, unless the schedule is of several.
    """
    stages = [PipelineStage(model, index, num_stages, CPU, group=group) for index, model in models.items()]

    def backward(scaler: Any) -> None:
        def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = scaler.scale((output - target).square().mean())
            return loss

        given = stages if issubclass(schedule, PipelineScheduleMulti) else stages[0]
        runner = schedule(given, n_microbatches=4, loss_fn=scaled_loss, scale_grads=False)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        runner.step(*[x] if 0 in models else [], **{"target": x} if num_stages - 1 in models else {})

    return Layout([param for model in models.values() for param in model.parameters()], backward, copies)


PIPELINES: dict[str, tuple[Any, Callable[[int], list[int]]]] = {
    "GPipe": (ScheduleGPipe, lambda rank: [rank]),
    "1F1B": (Schedule1F1B, lambda rank: [rank]),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, lambda rank: [rank, rank + 4]),
    "zero bubble": (ScheduleZBVZeroBubble, lambda rank: [rank, 7 - rank]),
}
"""Schedules, and the stages of a rank."""
if TorchVersion(torch.__version__) < (2, 12):
    del PIPELINES["zero bubble"]  # its stages, which meet on one rank, wait for each other for ever under gloo


def pipeline(rank: int) -> dict[str, Any]:
    """Memory that nothing was written to holds NaN: what a stage calls the loss function with to learn shapes."""
    torch.use_deterministic_algorithms(True)
    seen = {}
    for name, (schedule, indices) in PIPELINES.items():
        models = {index: Stage(index) for index in indices(rank)}
        seen[name] = observe(pipeline_layout(schedule, models, 4 * len(models), None, 1))
    torch.use_deterministic_algorithms(False)
    return seen


def three_dimensional(rank: int) -> dict[str, Any]:
    """Two stages, each under FSDP2 and tensor parallel on a 2x2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    index = mesh.get_local_rank("pp")
    model = Stage(index)
    tensor_parallel(model, mesh, "layers.")
    return observe(pipeline_layout(ScheduleGPipe, {index: model}, 2, mesh.get_group("pp"), 4), model)


@pytest.fixture(scope="module")
def on_four() -> dict[str, list[Any]]:
    return results_by_case([fsdp1, fsdp2, others, context_parallel, pipeline], 4)


@pytest.fixture(scope="module")
def on_eight() -> dict[str, list[Any]]:
    return results_by_case([three_dimensional], 8)


@pytest.mark.parametrize("kind", list(FSDP1))
def test_fsdp1(on_four: dict[str, list[Any]], kind: str) -> None:
    check([seen[kind] for seen in on_four["fsdp1"]], 4)


@pytest.mark.parametrize("kind", list(FSDP2))
def test_fsdp2(on_four: dict[str, list[Any]], kind: str) -> None:
    check([seen[kind] for seen in on_four["fsdp2"]], 3 if kind == "empty shards" else 4)


@pytest.mark.parametrize("kind", list(OTHERS))
def test_others(on_four: dict[str, list[Any]], kind: str) -> None:
    check([seen[kind] for seen in on_four["others"]], 4)


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_context_parallel(on_four: dict[str, list[Any]], kind: str) -> None:
    by_rank = [seen[kind] for seen in on_four["context_parallel"]]
    check(by_rank, 4)
    for seen in by_rank:
        assert seen["norm"] == pytest.approx(seen["norm of the whole"], rel=1e-6)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "interleaved 1F1B", "zero bubble"])
def test_pipeline(on_four: dict[str, list[Any]], schedule: str) -> None:
    if schedule not in PIPELINES:
        pytest.skip(f"torch {torch.__version__} does not begin this schedule under gloo")
    check([seen[schedule] for seen in on_four["pipeline"]], 4)


def test_fsdp2_with_tensor_and_pipeline_parallel(on_eight: dict[str, list[Any]]) -> None:
    check(on_eight["three_dimensional"], 8)
