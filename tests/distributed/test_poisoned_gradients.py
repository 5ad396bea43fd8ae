"""Every bad value, on every rank in turn, in every tensor, on DDP and FSDP2: all skip, and nothing else moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    BAD_VALUES,
    OPTIMIZERS,
    counted,
    local,
    poison,
    results_by_case,
    run_step,
    set_grad,
    snapshot,
    tiny_model,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE = 3
SCALE = 1024.0
LAYOUTS = ["ddp", "fsdp2-reshard", "fsdp2-keep"]
# Each dtype with another kind of optimizer, foreach and fused, so that both paths meet each layout.
DTYPES = {torch.float32: "adamw-foreach", torch.float16: "adamw-fused", torch.bfloat16: "sgd-momentum"}


def build(layout: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Sequential]:
    """The wrapped model, and the inner one that names the parameters."""
    model = tiny_model(dtype)
    if layout == "ddp":
        return DistributedDataParallel(model), model
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    reshards = layout == "fsdp2-reshard"
    fully_shard(model[0], mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    return model, model


def batch(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4).to(dtype)


def in_every_tensor(rank: int) -> dict[tuple[str, torch.dtype], list[Any]]:
    """Bad values put into the gradients as the layout left them, after its reduction."""
    return {
        (layout, dtype): _in_every_tensor(rank, layout, dtype, optimizer)
        for layout in LAYOUTS
        for dtype, optimizer in DTYPES.items()
    }


def _in_every_tensor(rank: int, layout: str, dtype: torch.dtype, optimizer_name: str) -> list[Any]:
    model, inner = build(layout, dtype)
    optimizer = OPTIMIZERS[optimizer_name](inner.parameters())
    scaler, reducer = counted(init_scale=SCALE, names=inner, max_norm=1.0)
    for _ in range(2):  # one step creates the optimizer's state; the second one's gradients stay
        optimizer.zero_grad()
        scaler.scale(model(batch(rank, dtype)).float().square().mean()).backward()
        clean = {name: param.grad.clone() for name, param in inner.named_parameters() if param.grad is not None}
        scaler.step(optimizer)
        scaler.update()
    before, num_exchanges = snapshot(optimizer), reducer.num_reduces
    holders = {name: gather_all(local(grad).numel() > 0) for name, grad in clean.items()}
    seen: list[Any] = [len(clean), {grad.dtype for grad in clean.values()} == {dtype}]
    for name, holds in holders.items():
        for bad_rank in range(WORLD_SIZE):
            for kind, value in BAD_VALUES.items():
                if not holds[bad_rank]:
                    continue
                for other, param in inner.named_parameters():
                    set_grad(param, clean[other])
                if rank == bad_rank:
                    poison(inner.get_parameter(name).grad, value)
                scaler.update(SCALE)  # each fault begins at the same scale
                report = run_step(scaler, optimizer)
                culprit = (report.culprit.rank, report.culprit.tensor, report.culprit.kind)
                wanted = (bad_rank, name, kind.removeprefix("-"))
                is_untouched = snapshot(optimizer) == before
                seen.append((report.skipped, culprit == wanted, report.next_scale, scaler.get_scale(), is_untouched))
    num_faults = len(seen) - 2
    seen += [reducer.num_reduces - num_exchanges == num_faults, reducer.num_gathers]

    for name, param in inner.named_parameters():
        set_grad(param, clean[name])
    report = run_step(scaler, optimizer)
    seen.append((report.skipped, snapshot(optimizer) != before, report.culprit))
    return seen


def gather_all(item: Any) -> list[Any]:
    items: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(items, item)
    return items


class BadBackward(torch.autograd.Function):
    """The identity, with a gradient whose first element is ``value``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.flatten()[0] = ctx.value
        return grad, None


def in_the_backward_pass(rank: int) -> dict[str, list[Any]]:
    """Bad values that one rank's backward pass makes, and that the layout's own reduction then spreads."""
    return {layout: _in_the_backward_pass(rank, layout) for layout in LAYOUTS}


def _in_the_backward_pass(rank: int, layout: str) -> list[Any]:
    model, inner = build(layout, torch.float32)
    optimizer = OPTIMIZERS["adamw-foreach"](inner.parameters())
    scaler, reducer = counted(init_scale=SCALE, names=inner)
    bad = {"rank": -1, "value": 0.0}
    # The gradient of the first layer's output: layers after it stay clean.
    inner[1].register_forward_pre_hook(
        lambda _, inputs: BadBackward.apply(inputs[0], bad["value"]) if rank == bad["rank"] else None
    )
    seen: list[Any] = []
    for bad_rank in range(-1, WORLD_SIZE):
        for kind, value in BAD_VALUES.items():
            bad.update(rank=bad_rank, value=value)
            before, scale = snapshot(optimizer), scaler.get_scale()
            optimizer.zero_grad()
            scaler.scale(model(batch(rank, torch.float32)).square().mean()).backward()
            holds_bad = gather_all(not local(inner[0].bias.grad).isfinite().all().item())
            scaler.step(optimizer)
            scaler.update()
            report = scaler.last_step
            assert report is not None
            culprit = report.culprit
            is_owner = culprit is not None and holds_bad[culprit.rank]
            seen.append(
                (
                    (bad_rank, kind),
                    report.skipped,
                    (culprit.tensor, culprit.kind, is_owner) if culprit else None,
                    scaler.get_scale() / scale,
                    snapshot(optimizer) == before,
                )
            )
    seen.append((reducer.num_reduces, reducer.num_gathers))
    return seen


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case([in_every_tensor, in_the_backward_pass], WORLD_SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_tensor(results: dict[str, list[Any]], layout: str, dtype: torch.dtype) -> None:
    by_rank = [seen[layout, dtype] for seen in results["in_every_tensor"]]
    assert all(seen == by_rank[0] for seen in by_rank)
    num_tensors, has_dtype, *faults, one_exchange_each, num_gathers, clean = by_rank[0]
    assert num_tensors == 6
    assert has_dtype
    # DDP: 6 tensors on 3 ranks. FSDP2: the shards that hold something.
    assert len(faults) == 3 * (18 if layout == "ddp" else 3 + 3 + 2 + 2 + 1 + 1)
    assert faults == [(True, True, SCALE / 2, SCALE / 2, True)] * len(faults)
    assert one_exchange_each
    assert num_gathers == 1
    assert clean == (False, True, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_the_backward_pass(results: dict[str, list[Any]], layout: str) -> None:
    by_rank = [seen[layout] for seen in results["in_the_backward_pass"]]
    assert all(seen == by_rank[0] for seen in by_rank)
    *steps, counts = by_rank[0]
    assert counts == (3 * (WORLD_SIZE + 1), 1)
    for (bad_rank, kind), skipped, culprit, change_of_scale, is_untouched in steps:
        if bad_rank < 0:
            assert (skipped, culprit, change_of_scale, is_untouched) == (False, None, 1.0, False)
        else:
            # Backward multiplies the bad element with inputs and sums it: the bias of that layer is the last to see it.
            assert (skipped, change_of_scale, is_untouched) == (True, 0.5, True)
            assert culprit == ("0.bias", kind.removeprefix("-"), True)
