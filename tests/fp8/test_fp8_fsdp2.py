"""Gradients of FSDP2 on the wire in FP8, against the exact sums of all ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gather_models
import layout_models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from wire_models import Blocks, agree, batch, errors, exact, new_scales, step

from distscale import ConfigError, DesyncError, DistributedGradScaler, ProcessGroupReducer
from distscale.fp8 import DelayedScaling, SentGradients, send_gradients_in_fp8
from distscale.fsdp_units import param_groups
from ranks import CountingReducer, run_ranks

INF_BITS = 0x7F800000


def shard(model: Blocks, **kwargs: Any) -> Blocks:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def one_loss(rank: int, **kwargs: Any) -> Callable[[nn.Module], list[Tensor]]:
    return lambda model: [model(batch(rank), **kwargs)]


def two_losses(rank: int, *uses_side: bool) -> Callable[[nn.Module], list[Tensor]]:
    return lambda model: [model(batch(rank, index), uses_side=uses_side[index]) for index in range(2)]


def check(found: dict[str, float], bound: float = 0.03) -> None:
    for name, error in found.items():
        # Sent in bf16, by default: norms and biases, and the embedding.
        is_exempt = "norm" in name or "bias" in name or "embedding" in name
        assert error < (0.006 if is_exempt else bound), (name, error)
        assert is_exempt or error > 0.002, (name, error)  # it did go through FP8


# ---------------------------------------------------------------- exact sums


def reductions(rank: int) -> None:
    world_size = dist.get_world_size()
    for granularity in ("tensor", "block"):
        for dtype in (None, torch.bfloat16, torch.float16):
            # torch 2.11 has a premultiplied sum on NCCL alone.
            for name in ("avg", "premultiplied", "sum") if callable(dist.ReduceOp.PREMUL_SUM) else ("avg", "sum"):
                model = Blocks()
                factor = 1 / 3.0 if name == "premultiplied" else 1 / world_size
                expected = exact(model, one_loss(rank), factor)
                shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
                for module in model.modules():
                    if isinstance(module, FSDPModule) and name == "premultiplied":
                        module.set_gradient_divide_factor(3.0)
                    if isinstance(module, FSDPModule) and name == "sum":
                        module.set_force_sum_reduction_for_comms(True)
                scales = new_scales("HYBRID")
                sent = send_gradients_in_fp8(model, scales, min_numel=0, granularity=granularity)  # type: ignore[arg-type]
                agree(scales)
                for _ in range(2):  # with the own amax, and with the agreed scale
                    model.zero_grad()
                    model(batch(rank)).backward()
                    check(errors(model, expected))
                    assert not step(scales)[1].any()
                assert 1.0 <= sent.traffic.num_bytes / sent.traffic.num_values < 1.5


def accumulation(rank: int) -> None:
    world_size = dist.get_world_size()
    for syncs_each in (True, False):
        for dtype in (None, torch.bfloat16):
            model = Blocks()
            # A reduction of a unit lacks a parameter; or one of its gradients is only of the micro-batch before.
            uses_side = (False, True) if dtype is None else (True, syncs_each)
            expected = exact(model, two_losses(rank, *uses_side), 1 / world_size)
            param_dtype = None if dtype is None else torch.float32
            shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=dtype))
            scales = new_scales()
            sent = send_gradients_in_fp8(model, scales, min_numel=0)
            agree(scales)
            for index in range(2):
                model.set_requires_gradient_sync(syncs_each or index == 1)  # type: ignore[operator]
                model(batch(rank, index), uses_side=uses_side[index]).backward()
            check(errors(model, expected))
            num_params = sum(param.numel() for param in model.parameters())
            num_values = sent.traffic.num_values * world_size / (world_size - 1)
            at_least, at_most = (1.7, 2.2) if syncs_each else (1.0, 1.1)
            assert at_least * num_params <= num_values < at_most * num_params


def unused(rank: int) -> None:
    model = Blocks()
    expected = exact(model, one_loss(rank, uses_side=False), 1 / dist.get_world_size())
    shard(model)
    scales = new_scales()
    send_gradients_in_fp8(model, scales, min_numel=0)
    agree(scales)
    model(batch(rank), uses_side=False).backward()
    check(errors(model, expected, unused=["side"]))
    bits, _ = step(scales)
    seen = {tensor.name: amax > 0 for tensor, amax in zip(scales.tensors, bits.tolist(), strict=True)}
    assert seen == {name: "side" not in name for name in seen}


def twice(rank: int) -> None:
    """One unit is called twice in a forward pass."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.inner = nn.Linear(64, 64)
            self.outer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.tanh(self.outer(torch.tanh(self.inner(x))))).square().sum()  # type: ignore[no-any-return]

    torch.manual_seed(rank)
    x = torch.randn(8, 64)
    model = Twice()
    expected = exact(model, lambda model: [model(x)], 1 / dist.get_world_size())
    fully_shard(model.inner)
    fully_shard(model)
    scales = new_scales()
    send_gradients_in_fp8(model, scales)
    agree(scales)
    model(x).backward()
    found = errors(model, expected)
    assert 0.002 < found["inner.weight"] < 0.04 and 0.002 < found["outer.weight"] < 0.03, found


def other_dims(rank: int) -> None:
    model = Blocks()
    expected = exact(model, one_loss(rank), 1 / dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else Shard(0))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    scales = new_scales()
    send_gradients_in_fp8(model, scales, min_numel=0)
    agree(scales)
    model(batch(rank)).backward()
    check(errors(model, expected))


def exemptions(rank: int) -> None:
    model = shard(Blocks())
    scales = new_scales()
    send_gradients_in_fp8(model, scales, min_numel=0, prefix="model.", exempt=lambda name, _: name != "head.weight")
    assert [tensor.name for tensor in scales.tensors] == ["model.head.weight.grad"]
    with pytest.raises(ConfigError, match="are sent in FP8 already"):
        send_gradients_in_fp8(model, new_scales())
    scales = new_scales()
    send_gradients_in_fp8(shard(Blocks()), scales)
    assert not scales.tensors  # all are small
    with pytest.raises(ConfigError, match="fully_shard"):
        send_gradients_in_fp8(Blocks(), new_scales())
    both = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard([both[0], both[1]])
    with pytest.raises(ConfigError, match="the FSDP2 unit of FSDPLinear has parameters of other modules"):
        send_gradients_in_fp8(both[0], new_scales())
    send_gradients_in_fp8(both, new_scales())


def wide(rank: int) -> None:
    """Of a block of a transformer of width 512, every byte that is sent is counted."""
    for granularity in ("tensor", "block"):
        torch.manual_seed(0)
        block = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512))
        torch.manual_seed(1 + rank)
        x = torch.randn(4, 512)
        expected = exact(block, lambda model, x=x: [model(x).square().sum()], 1 / dist.get_world_size())
        model = fully_shard(block)
        sent = send_gradients_in_fp8(model, new_scales(), granularity=granularity)  # type: ignore[arg-type]
        model(x).square().sum().backward()
        found = errors(model, expected)
        assert max(found["1.weight"], found["3.weight"]) < 0.03
        num_params = sum(param.numel() for param in model.parameters())
        num_peers = dist.get_world_size() - 1
        assert sent.traffic.num_values == num_peers * num_params // dist.get_world_size()
        assert num_params < sent.traffic.num_bytes / num_peers * dist.get_world_size() <= 0.51 * 2 * num_params
        assert sent.traffic.num_bytes <= 0.26 * 4 * sent.traffic.num_values


def with_tensor_parallelism(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank // 2)  # ranks of one "tp" row have the same input
    x = torch.randn(8, 64)
    model = layout_models.block(width=64)
    expected = exact(model, lambda model: [model(x).square().sum()], 1 / 4)
    layout_models.tensor_parallel(model, mesh)
    scales = new_scales()
    send_gradients_in_fp8(model, scales, min_numel=0)
    agree(scales)
    assert [tensor.name for tensor in scales.tensors] == ["0.weight.grad", "2.weight.grad"]
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        found = errors(model, expected)
        for name in ("0.weight", "2.weight"):
            assert 0.002 < found[name] < 0.03, found
        assert not step(scales)[1].any()


def weights_on_two_meshes(rank: int) -> None:
    """Weights that travel in FP8 within the shards of HSDP, and as shards of a tensor-parallel shard."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def of_tensor_parallel(model: nn.Module) -> None:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(model, both["tp"], plan)
        gather_models.sharded(model, torch.bfloat16, both["dp"])

    layouts: list[tuple[Callable[[nn.Module], object], int, int]] = [
        # Rows of a rank: 23 of `up`, 16 of `down`.
        (partial(gather_models.sharded, dtype=torch.bfloat16, mesh=hybrid), rank, 23 * 31 + 16 * 45),
        # Its part of `up` has 23 rows or 22, of which it keeps 12 or 11; that of `down` 16 rows of 23 or 22 columns.
        (of_tensor_parallel, rank // 2, (12 * 31 + 16 * 23) if rank % 2 == 0 else (11 * 31 + 16 * 22)),
    ]
    for lay_out, seed, num_weights in layouts:
        expected, trained = (gather_models.train(seed, DelayedScaling(), in_fp8, lay_out) for in_fp8 in (False, True))
        gather_models.check_same(trained, expected, num_weights, torch.bfloat16)
        everywhere = [trained.fp8] * 4
        dist.all_gather_object(everywhere, trained.fp8)
        assert all(fp8 == trained.fp8 for fp8 in everywhere)


# ---------------------------------------------------------------- what is seen


def saturation(rank: int) -> None:
    model = shard(Blocks())
    scales = new_scales()
    sent = send_gradients_in_fp8(model, scales, min_numel=0)
    agree(scales)
    model(batch(rank)).backward()
    _, none = step(scales)
    assert not none.any()
    names = [tensor.name for tensor in scales.tensors]
    before = scales_of(sent)
    assert set(before) == set(names)
    loss = model(batch(rank)) * (1000.0 if rank == 1 else 1.0)  # its gradients alone grow
    loss.backward()
    model(batch(rank)).backward()  # another micro-batch, in which nothing saturates
    _, num_saturated = step(scales)
    assert (num_saturated > 0).all()
    after = scales_of(sent)
    for name in names:
        assert before[name] / 2048 <= after[name] <= before[name] / 128, name
    model.zero_grad()
    (model(batch(rank)) * (1000.0 if rank == 1 else 1.0)).backward()
    assert not step(scales)[1].any()


def scales_of(sent: SentGradients) -> dict[str, float]:
    meters = [sender.meter for sender in sent.senders]
    return {
        tensor.name: scale
        for meter in meters
        for tensor, scale in zip(meter.tensors, meter.scale.tolist(), strict=True)
    }


def not_finite(rank: int) -> None:
    for granularity in ("tensor", "block"):
        for value in (math.inf, -math.inf, math.nan):
            for is_agreed in (False, True):
                model = shard(Blocks())
                scales = new_scales()
                send_gradients_in_fp8(model, scales, min_numel=0, granularity=granularity)  # type: ignore[arg-type]
                agree(scales)
                if is_agreed:
                    model(batch(rank)).backward()
                    step(scales)
                    model.zero_grad()
                loss = model(batch(rank))
                if rank == 1:
                    poison = torch.zeros(49, 32)
                    poison[40, 3] = value
                    assert not isinstance(model.head.weight, DTensor)  # it is whole until the backward pass has ended
                    model.head.weight.register_hook(poison.add)
                loss.backward()
                bits, _ = scales.collect(torch.device("cpu"))
                names = [tensor.name for tensor in scales.tensors]
                bad = [name for name, amax in zip(names, bits.tolist(), strict=True) if amax >= INF_BITS]
                assert bad == (["head.weight.grad"] if rank == 1 else []), (bad, value)
                grad = model.head.weight.grad.full_tensor()  # type: ignore[union-attr]
                assert not grad[40, 3].isfinite()
                assert grad.isfinite().sum() >= grad.numel() - (128 if granularity == "block" else 1)


def other_tensors(rank: int) -> None:
    """Two parameters of one size, of which each rank uses another one."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return (self.left if rank == 0 else self.right)(x).sum()  # type: ignore[no-any-return]

    model = fully_shard(Either())
    send_gradients_in_fp8(model, new_scales())
    others = list(range(1, dist.get_world_size())) if rank == 0 else [0]
    with pytest.raises(DesyncError, match=re.escape(f"ranks {others} sent gradients of other tensors")):
        model(torch.ones(1, 64)).backward()


def unknown(rank: int) -> None:
    """Where it cannot be told what is in the flat gradient, it is reduced as without us."""
    model = Blocks()
    expected = exact(model, one_loss(rank), 1 / dist.get_world_size())
    shard(model)
    scales = new_scales()
    send_gradients_in_fp8(model, scales, min_numel=0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            (group,) = param_groups(module)
            del group.post_backward  # our note of what has a gradient
    with pytest.warns(UserWarning, match="are reduced without FP8"):
        model(batch(rank)).backward()
    assert max(errors(model, expected).values()) < 1e-5


def hsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Blocks()
    expected = exact(model, one_loss(rank), 1 / 4)
    shard(model, mesh=mesh)
    scales = new_scales()
    send_gradients_in_fp8(model, scales, min_numel=0)
    agree(scales)
    for _ in range(2):
        model.zero_grad()
        model(batch(rank)).backward()
        check(errors(model, expected))
        step(scales)
    # A micro-batch that is summed within the shards alone, and one that is summed over the replicas, too.
    model.zero_grad()
    expected = exact(Blocks(), two_losses(rank, True, True), 1 / 4)
    for index in range(2):
        model.set_requires_all_reduce(index == 1)  # type: ignore[operator]
        model(batch(rank, index)).backward()
    check(errors(model, expected))


def with_a_scaler(rank: int) -> None:
    """What was seen of sent gradients travels in the exchange: all skip, know why, and go on with the same scales."""
    model = shard(Blocks())
    scales = new_scales()
    sent = send_gradients_in_fp8(model, scales, min_numel=0)
    reducer = CountingReducer(ProcessGroupReducer())
    scaler = DistributedGradScaler(
        "cpu", init_scale=1024.0, growth_interval=2, names=model, fp8=scales, reducer=reducer
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    last_rank = dist.get_world_size() - 1
    reports = []
    for index in range(5):
        optimizer.zero_grad()
        # The loss scale doubles after two steps: sent gradients do, and their scales halve, so nothing saturates.
        loss = model(batch(rank, index // 4)) * (64.0 if index == 4 and rank == last_rank else 1.0)
        if index == 2 and rank == last_rank:
            poison = torch.zeros(49, 32)
            poison[40, 3] = math.nan
            handle = model.head.weight.register_hook(poison.add)
        scaler.scale(loss).backward()
        if index == 2 and rank == last_rank:
            handle.remove()
        before = [param.detach().clone() for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step
        assert report is not None
        is_same = all(map(torch.equal, before, (param.detach() for param in model.parameters())))
        assert is_same == report.skipped == (index == 2)
        reports.append(report)
    culprit = reports[2].culprit
    assert culprit is not None and (culprit.rank, culprit.kind) == (last_rank, "nan")
    assert culprit.tensor.startswith("head.weight")
    assert [report.scale for report in reports] == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0]
    assert [any(report.num_saturated.values()) for report in reports] == [False, False, False, False, True]
    assert reports[4].num_saturated["head.weight.grad"] > 0
    assert reducer.num_reduces == 5  # one a step
    everywhere = [scales_of(sent)] * dist.get_world_size()
    dist.all_gather_object(everywhere, scales_of(sent))
    assert all(mine == everywhere[0] for mine in everywhere)


CASES_OF_ALL = [
    reductions,
    accumulation,
    unused,
    twice,
    other_dims,
    exemptions,
    saturation,
    not_finite,
    unknown,
    with_a_scaler,
]


def cases(rank: int, functions: Sequence[Callable[[int], None]]) -> None:
    for function in functions:
        function(rank)


def test_on_two_ranks() -> None:
    run_ranks(cases, 2, [*CASES_OF_ALL, other_tensors], timeout_s=110.0)


def test_on_four_ranks() -> None:
    run_ranks(
        cases,
        4,
        [hsdp, with_tensor_parallelism, weights_on_two_meshes, accumulation, saturation, with_a_scaler, other_tensors],
        timeout_s=110.0,
    )
