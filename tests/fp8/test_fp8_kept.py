"""Gradients that are kept in FP8 up to the optimizer: swept as they are, unscaled, clipped, dropped, on real shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from distscale import ConfigError, DistributedGradScaler, LocalReducer
from distscale.fp8 import keep_gradients_in_fp8
from ranks import run_ranks


def slope(values: Tensor) -> tuple[nn.Parameter, Tensor]:
    """A parameter, and a loss with the gradient ``values``."""
    param = nn.Parameter(torch.zeros_like(values))
    return param, values


class Given(torch.autograd.Function):
    """A loss of 0 with any gradient."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def scaler_for(**arguments: Any) -> DistributedGradScaler:
    return DistributedGradScaler(
        "cpu", **{"init_scale": 1024.0, "reducer": LocalReducer(), "max_norm": math.inf, **arguments}
    )


def sgd(param: nn.Parameter) -> Optimizer:
    return SGD([param], lr=1.0)


def fused_sgd(param: nn.Parameter) -> Optimizer:
    return SGD([param], lr=1.0, fused=True)


@pytest.mark.parametrize("make", [sgd, fused_sgd])
def test_micro_batches_add_up_and_a_step_takes_them(make: Callable[[nn.Parameter], Optimizer]) -> None:
    param, values = slope(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    keep_gradients_in_fp8([param])
    optimizer, scaler = make(param), scaler_for()
    for step in range(3):
        for micro_batch in range(2):
            scaler.scale((param * values).sum()).backward()
            assert param.grad is None
            kept = param.fp8_grad  # type: ignore[attr-defined]
            assert kept.values.dtype is torch.float8_e4m3fn
            assert torch.equal(kept.dequantized(), values * 1024.0 * (micro_batch + 1))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step is not None
        assert scaler.last_step.grad_norm == pytest.approx(float((2 * values).norm()))
        assert scaler.last_step.amax == {f"{type(optimizer).__name__}0.group0.param0": 6.0}
        assert torch.equal(param.detach(), -2 * values * (step + 1))
        assert not hasattr(param, "fp8_grad")
        optimizer.zero_grad()


def test_they_are_clipped() -> None:
    param, values = slope(torch.tensor([3.0, -4.0]))
    keep_gradients_in_fp8([param])
    optimizer, scaler = sgd(param), scaler_for(max_norm=1.0)
    scaler.scale((param * values).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(param.detach(), -values / 5)


@pytest.mark.parametrize("make", [sgd, fused_sgd])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_value_skips_and_is_forgotten(bad: float, make: Callable[[nn.Parameter], Optimizer]) -> None:
    param, values = slope(torch.tensor([3.0, -4.0]))
    keep_gradients_in_fp8([param])
    optimizer, scaler = make(param), scaler_for()
    for factors, skips in ((values, False), (torch.tensor([bad, 1.0]), True), (values, False)):
        old = param.detach().clone()
        scaler.scale((param * factors).sum().nan_to_num()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step is not None
        assert scaler.last_step.skipped is skips
        assert torch.equal(param.detach(), old if skips else old - values)
        optimizer.zero_grad()


def test_unscale_gives_them_back() -> None:
    param, values = slope(torch.tensor([3.0, -4.0]))
    keep_gradients_in_fp8([param])
    optimizer, scaler = sgd(param), scaler_for()
    scaler.scale((param * values).sum()).backward()
    scaler.unscale_(optimizer)
    assert param.grad is not None and torch.equal(param.grad, values)
    scaler.step(optimizer)
    assert torch.equal(param.detach(), -values)


def test_those_that_wait_follow_the_scale() -> None:
    """An optimizer that steps at every other update; the scale changes in between, and would overflow FP8 itself."""
    (often, values), (rarely, _) = slope(torch.tensor([1.0])), slope(torch.tensor([1.0]))
    keep_gradients_in_fp8([often, rarely])
    optimizers = [sgd(often), sgd(rarely)]
    scaler = scaler_for(growth_factor=1024.0, growth_interval=1, max_scale=2.0**40)
    scaler.scale((often * values).sum() + (rarely * values).sum()).backward()
    scaler.step(*optimizers)
    scaler.update()
    for _ in range(2):
        scaler.scale((often * values).sum() + (rarely * values).sum()).backward()
        scaler.step(optimizers[0])
        scaler.update()
    scaler.scale((often * values).sum() + (rarely * values).sum()).backward()
    scaler.step(*optimizers)
    assert (often.item(), rarely.item()) == (-4.0, -4.0)


@pytest.mark.parametrize("factors", [torch.tensor([3.0 - 4.0j]), torch.tensor([3.0, 0.0, -4.0]).to_sparse()])
def test_complex_and_sparse_gradients_stay_as_they_are(factors: Tensor) -> None:
    param = nn.Parameter(torch.zeros(factors.shape, dtype=factors.dtype))
    keep_gradients_in_fp8([param])
    optimizer, scaler = sgd(param), scaler_for()
    scaler.scale(torch.tensor(1.0))
    Given.apply(param, factors * 1024.0).backward()  # type: ignore[no-untyped-call]
    assert param.grad is not None and not hasattr(param, "fp8_grad")
    scaler.step(optimizer)
    assert torch.equal(param.detach(), -factors.to_dense())


def test_a_handle_ends_it_and_nothing_to_keep_is_told() -> None:
    param, values = slope(torch.tensor([3.0]))
    (handle,) = keep_gradients_in_fp8([param])
    handle.remove()
    (param * values).sum().backward()
    assert param.grad is not None
    with pytest.raises(ConfigError, match="no parameter"):
        keep_gradients_in_fp8([])


# ---------------------------------------------------------------- FSDP2


def train(rank: int) -> dict[str, Any]:
    """Two micro-batches a step, with and without; a bad value on one rank; bytes held between the micro-batches."""
    mesh = init_device_mesh("cpu", (2,))
    seen: dict[str, Any] = {}
    for kind in ("plain", "kept"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 4))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        if kind == "kept":
            keep_gradients_in_fp8(model.parameters())
        optimizer = AdamW(model.parameters(), lr=0.01)
        scaler = DistributedGradScaler("cpu", init_scale=1024.0, max_norm=1.0, names=model)
        losses, reports = [], []
        for step in range(12):
            for micro_batch in range(2):
                torch.manual_seed(100 * step + 10 * micro_batch + rank)
                inputs = torch.randn(8, 16)
                loss = (model(inputs) - inputs[:, :4].cumsum(1)).square().mean() / 2
                if step == 6 and micro_batch == 1 and rank == 1:
                    loss = loss * 1e37
                scaler.scale(loss).backward()
            if kind == "kept":
                assert all(param.grad is None for param in model.parameters())
                held = [param.fp8_grad.values for param in model.parameters()]
                assert {values.dtype for values in held} == {torch.float8_e4m3fn}
                assert [len(values) for values in held] == [len(param.to_local()) for param in model.parameters()]
            losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            reports.append(scaler.last_step)
        seen[kind] = (losses, reports)
    return seen


def check_that_pending_sums_are_summed(rank: int) -> None:
    """Sequence parallelism: the gradient of a norm is a sum over ranks that is still to be made."""
    mesh = init_device_mesh("cpu", (2,))
    norms = []
    for keeps in (False, True):
        model = parallelize_module(nn.Sequential(nn.LayerNorm(16)), mesh, {"0": SequenceParallel()})
        if keeps:
            keep_gradients_in_fp8(model.parameters())
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = DistributedGradScaler("cpu", init_scale=1024.0, max_norm=math.inf, names=model)
        torch.manual_seed(0)
        inputs, weights = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
        for _ in range(2):
            output = model(distribute_tensor(inputs, mesh, [Shard(1)]))
            scaler.scale((output.full_tensor() * weights).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step is not None
        norms.append(scaler.last_step.grad_norm)
    assert norms[1] == norms[0] > 0


def check_that_wrappers_which_reduce_later_are_refused() -> None:
    for views in (False, True):
        replica = DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=views)
        keep_gradients_in_fp8(replica.parameters())
        optimizer = SGD(replica.parameters(), lr=0.1)
        scaler = DistributedGradScaler("cpu", names=replica)
        scaler.scale(replica(torch.ones(2, 4)).sum()).backward()
        with pytest.raises(ConfigError, match=r"of shape \(4, 4\) got a gradient after its own was moved into FP8"):
            scaler.step(optimizer)
    for is_original in (False, True):
        wrapped = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=is_original, device_id=torch.device("cpu"))
        with pytest.raises(ConfigError, match="cannot be kept in FP8 under FSDP1"):
            keep_gradients_in_fp8(wrapped.parameters())


def ranks(rank: int) -> dict[str, Any]:
    seen = train(rank)
    check_that_pending_sums_are_summed(rank)
    check_that_wrappers_which_reduce_later_are_refused()
    return seen


def test_fsdp2_trains_alike_and_skips_alike() -> None:
    for seen in run_ranks(ranks, 2):
        (plain, plain_reports), (kept, kept_reports) = seen["plain"], seen["kept"]
        assert [report.skipped for report in plain_reports] == [report.skipped for report in kept_reports]
        assert [report.step for report in kept_reports if report.skipped] == [6]
        assert kept == pytest.approx(plain, rel=0.05)
        assert kept != plain
        for ours, theirs in zip(kept_reports[:6], plain_reports[:6], strict=True):
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.03)
