"""Scales that run away, losses that stay bad, gradients at the edge of what numbers can hold: over two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import (
    OPTIMIZERS,
    counted,
    error_of,
    on_all,
    poison,
    results_by_case,
    run_step,
    set_grad,
    snapshot,
    tiny_model,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from distscale import StepReport
from distscale.policy import MAX_SCALE, MIN_SCALE

WORLD_SIZE = 2
SCALE = 1024.0
INF, NAN = float("inf"), float("nan")


def told(report: StepReport | None) -> tuple[Any, ...] | None:
    assert report is not None
    return report.culprit and (report.culprit.rank, report.culprit.tensor, report.culprit.kind)


# ---------------------------------------------------------------- the scale


def c10_floor(rank: int) -> dict[str, Any]:
    """A gradient that is always inf on rank 1; then one that is zero, at the floor."""
    seen = {}
    for kind in ("sgd-momentum", "sgd-momentum-fused"):
        param = nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS[kind]([param])
        scaler, _ = counted(init_scale=MIN_SCALE * 4, names={"weight": param}, max_consecutive_skips=3)
        scales, error = [], ("", "")
        for _ in range(10):
            set_grad(param, torch.full((2,), INF if rank == 1 else 0.0))
            error = error_of(lambda: run_step(scaler, optimizer))  # noqa: B023
            scales.append(scaler.get_scale())
            if error[0]:
                break
        untouched = param.tolist()
        set_grad(param, torch.zeros(2))
        report = run_step(scaler, optimizer)
        seen[kind] = (scales, error, untouched, report.skipped, param.tolist())
    return seen


def c10_unscaling_overflows(rank: int) -> dict[str, Any]:
    """1e36 on rank 1 at a scale of 2^-20: finite, and inf once it is unscaled."""
    seen = {}
    for kind in OPTIMIZERS:
        param = nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS[kind]([param])
        scaler, _ = counted(init_scale=2.0**-20, names={"weight": param})
        for grad in (2.0**-20, 2.0**-20, 1e36 if rank == 1 else 2.0**-20):
            before = snapshot(optimizer)
            set_grad(param, torch.tensor([2.0**-20, grad]))
            report = run_step(scaler, optimizer)
        seen[kind] = (report.skipped, told(report), snapshot(optimizer) == before)
    return seen


def c10_torch(rank: int) -> list[float]:
    """For comparison: torch.amp.GradScaler, a scale of 2^-130 and gradients of zero."""
    param = nn.Parameter(torch.ones(2))
    set_grad(param, torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-130)
    scaler.scale(torch.ones(()))
    scaler.step(SGD([param], lr=1.0))
    values: list[float] = param.tolist()
    return values


def c11_growth(rank: int) -> dict[str, Any]:
    """Growth at each of 200 steps with tiny gradients, on one rank smaller than on the other."""
    seen = {}
    for name, arguments in {"default": {}, "capped": {"max_scale": 3.0 * 2.0**20}}.items():
        param = nn.Parameter(torch.ones(2))
        optimizer = SGD([param], lr=1.0)
        scaler, _ = counted(growth_interval=1, **arguments)
        num_skipped = 0
        for _ in range(200):
            optimizer.zero_grad()
            scaler.scale((param * 1e-30 * (rank + 1)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            report = scaler.last_step
            assert report is not None
            num_skipped += report.skipped
        seen[name] = (scaler.get_scale(), num_skipped, param.isfinite().all().item())
    return seen


def c27_growth_step(rank: int) -> dict[str, Any]:
    """The scale grows or falls at each step, and each step subtracts the true gradient, 3, once."""
    seen = {}
    for kind in ("sgd-loop", "sgd-fused"):
        param = nn.Parameter(torch.zeros(2))
        optimizer = SGD([param], lr=1.0, fused=kind == "sgd-fused", foreach=False)
        scaler, _ = counted(init_scale=SCALE, growth_interval=1)
        steps = []
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(param.sum() * 3.0).backward()
            if step == 3 and rank == 1:
                poison(param.grad, NAN)
            scaler.step(optimizer)
            scaler.update()
            steps.append((scaler.get_scale() / SCALE, param.tolist()))
        seen[kind] = steps
    return seen


def c30_large_norm(rank: int) -> tuple[bool, float | None, float | None]:
    """Squares of these gradients are beyond fp32, the gradients are not."""
    param = nn.Parameter(torch.ones(2))
    set_grad(param, torch.full((2,), 2.0**100))
    scaler, _ = counted(init_scale=2.0**32, max_norm=1.0)
    report = run_step(scaler, SGD([param], lr=1.0))
    return report.skipped, report.grad_norm, report.clip_coef


# ---------------------------------------------------------------- the loss


def c37_loss(rank: int) -> dict[str, Any]:
    """The loss is not finite on one rank; the layout spreads the bad gradients to all of them."""
    seen: dict[str, Any] = {}
    for layout in ("ddp", "fsdp2"):
        inner = tiny_model()
        if layout == "fsdp2":
            fully_shard(inner, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
        model: nn.Module = inner if layout == "fsdp2" else DistributedDataParallel(inner)
        optimizer = OPTIMIZERS["adamw-fused" if layout == "ddp" else "adamw-foreach"](inner.parameters())
        scaler, reducer = counted(init_scale=SCALE, names=inner, max_norm=1.0)
        steps = []
        for bad_rank, value in ((None, 0.0), (0, NAN), (1, NAN), (1, INF), (0, -INF), (None, 0.0)):
            before = snapshot(optimizer)
            optimizer.zero_grad()
            loss = model(torch.linspace(-1.0, 1.0, 20).view(5, 4)).square().mean()
            scaler.scale(loss + value if rank == bad_rank else loss).backward()
            if rank == bad_rank:  # as a loss of NaN leaves them, through most models
                poison(inner[0].weight.grad, NAN)
            scaler.step(optimizer)
            scaler.update()
            report = scaler.last_step
            assert report is not None
            steps.append((report.skipped, told(report), scaler.get_scale(), snapshot(optimizer) == before))
        seen[layout] = (steps, reducer.num_reduces)
    return seen


def c12_loss_for_ever(rank: int) -> dict[str, Any]:
    """From step 2 on the loss of rank 1 is NaN."""
    seen = {}
    for kind in ("adamw-foreach", "adamw-fused"):
        param = nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS[kind]([param])
        scaler, _ = counted(init_scale=SCALE, max_consecutive_skips=4)
        errors = []
        for step in range(6):
            before = snapshot(optimizer)
            set_grad(param, torch.ones(2))
            scaler.scale(torch.tensor(NAN if rank == 1 and step >= 2 else 1.0))
            scaler.step(optimizer)
            errors.append((*error_of(scaler.update), snapshot(optimizer) == before))
        seen[kind] = (errors, scaler.get_scale())
    return seen


def c32_counter(rank: int) -> tuple[list[str], float]:
    """Runs of three bad losses with a good step between them, where four in a row would be an error."""
    param = nn.Parameter(torch.ones(2))
    optimizer = SGD([param], lr=1.0)
    scaler, _ = counted(init_scale=SCALE, max_consecutive_skips=4)
    errors = []
    for step in range(12):
        set_grad(param, torch.ones(2))
        scaler.scale(torch.tensor(NAN if rank == 0 and step % 4 else 1.0))
        scaler.step(optimizer)
        errors.append(error_of(scaler.update)[0])
    return errors, scaler.get_scale()


# ---------------------------------------------------------------- the gradients


def c26_nan_beside_a_number(rank: int) -> list[Any]:
    """(1, NaN) and (NaN, 1) on either rank, while the other one has larger finite values, or an inf."""
    seen = []
    for bad_rank in range(WORLD_SIZE):
        for values in ([1.0, NAN], [NAN, 1.0]):
            for other in (3.0, INF):
                param = nn.Parameter(torch.ones(2))
                set_grad(param, torch.tensor(values if rank == bad_rank else [other, 3.0]))
                scaler, _ = counted(init_scale=SCALE, names={"weight": param})
                report = run_step(scaler, SGD([param], lr=1.0))
                seen.append((report.skipped, told(report) == (bad_rank, "weight", "nan"), param.tolist()))
    return seen


def c22_sparse(rank: int) -> list[Any]:
    """An embedding in fp16: on rank 1, two entries of one row are finite and their sum is not."""
    weight = nn.Parameter(torch.zeros(5, 2, dtype=torch.float16))
    optimizer = SGD([weight], lr=1.0)
    scaler, _ = counted(init_scale=2.0, names={"embedding": weight})
    seen = []
    for large in (6e4, 100.0):
        index = torch.tensor([[1, 3, 1]])
        rows = torch.full((3, 2), large if rank == 1 else 100.0, dtype=torch.float16)
        weight.grad = torch.sparse_coo_tensor(index, rows, (5, 2))
        report = run_step(scaler, optimizer)
        seen.append((report.skipped, told(report), weight[1].tolist()))
        weight.data.zero_()
    return seen


def c24_torch(rank: int) -> str:
    """For comparison: gradients in fp16."""
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    set_grad(param, torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return error_of(lambda: scaler.step(SGD([param], lr=1.0)))[1]


CASES = [
    c10_floor,
    c10_unscaling_overflows,
    c10_torch,
    c11_growth,
    c27_growth_step,
    c30_large_norm,
    c37_loss,
    c12_loss_for_ever,
    c32_counter,
    c26_nan_beside_a_number,
    c22_sparse,
    c24_torch,
]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


def test_c10_the_scale_stops_at_its_floor(results: dict[str, list[Any]]) -> None:
    for scales, (kind, text), untouched, last_skipped, last in on_all(results["c10_floor"]).values():
        assert scales == [MIN_SCALE * 2, *[MIN_SCALE] * 4]
        assert kind == "ScaleExhaustedError"
        assert "3 steps were skipped in a row, since step 2" in text
        assert "the gradient of weight is inf on rank 1, while the loss is finite" in text
        assert untouched == [1.0, 1.0]
        # Zero is zero at any scale.
        assert not last_skipped
        assert last == [1.0, 1.0]


def test_c10_torch_loses_the_weights(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about."""
    assert all(value != value for values in results["c10_torch"] for value in values)


def test_c10_a_gradient_that_is_inf_once_unscaled(results: dict[str, list[Any]]) -> None:
    for kind, seen in on_all(results["c10_unscaling_overflows"]).items():
        assert seen == (True, (1, "weight", "inf"), True), kind


def test_c11_the_scale_stops_at_its_cap(results: dict[str, list[Any]]) -> None:
    assert on_all(results["c11_growth"]) == {"default": (MAX_SCALE, 0, True), "capped": (3.0 * 2.0**20, 0, True)}


def test_c27_each_gradient_is_unscaled_by_its_own_scale(results: dict[str, list[Any]]) -> None:
    for steps in on_all(results["c27_growth_step"]).values():
        assert [scale for scale, _ in steps] == [2.0, 4.0, 8.0, 4.0, 8.0, 16.0]
        assert [values for _, values in steps] == [[-3.0 * n] * 2 for n in (1, 2, 3, 3, 4, 5)]


def test_c30_a_large_norm_is_no_overflow(results: dict[str, list[Any]]) -> None:
    skipped, norm, coef = on_all(results["c30_large_norm"])
    assert not skipped
    assert norm == pytest.approx(2.0**68.5, rel=1e-12)
    assert coef == pytest.approx(2.0**-68.5, rel=1e-12)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_c37_a_bad_loss_on_one_rank(results: dict[str, list[Any]], layout: str) -> None:
    steps, num_reduces = on_all([seen[layout] for seen in results["c37_loss"]])
    culprits = [None, (0, "loss", "nan"), (1, "loss", "nan"), (1, "loss", "inf"), (0, "loss", "inf"), None]
    assert [culprit for _, culprit, _, _ in steps] == culprits
    assert [skipped for skipped, *_ in steps] == [False, True, True, True, True, False]
    assert [is_same for *_, is_same in steps] == [False, True, True, True, True, False]
    assert {scale for _, _, scale, _ in steps} == {SCALE}
    assert num_reduces == 6


def test_c12_a_loss_that_stays_bad_ends_the_run(results: dict[str, list[Any]]) -> None:
    for errors, scale in on_all(results["c12_loss_for_ever"]).values():
        *before, (kind, text, is_same) = errors
        assert before == [("", "", False)] * 2 + [("", "", True)] * 3
        assert kind == "ScaleExhaustedError"
        assert "the loss itself is not finite" in text
        assert "4 steps were skipped in a row, since step 2" in text
        assert "nan on rank 1" in text
        assert is_same
        assert scale == SCALE


def test_c32_a_clean_step_resets_the_count(results: dict[str, list[Any]]) -> None:
    assert on_all(results["c32_counter"]) == ([""] * 12, SCALE)


def test_c26_nan_is_found_beside_any_number(results: dict[str, list[Any]]) -> None:
    assert on_all(results["c26_nan_beside_a_number"]) == [(True, True, [1.0, 1.0])] * 8


def test_c22_duplicates_are_summed_before_the_check(results: dict[str, list[Any]]) -> None:
    first, second = on_all(results["c22_sparse"])
    assert first == (True, (1, "embedding", "inf"), [0.0, 0.0])
    # 100 twice, at a scale that has fallen from 2 to 1.
    assert second == (False, None, [-200.0, -200.0])


def test_c24_torch_refuses_gradients_in_fp16(results: dict[str, list[Any]]) -> None:
    """Not our code: shows the fault that the case is about; ours takes them, see test_poisoned_gradients."""
    assert on_all(results["c24_torch"]) == "Attempting to unscale FP16 gradients."
