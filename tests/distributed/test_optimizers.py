"""What reaches the optimizers, of every kind: nothing on a skip, the exact gradient on a step."""

from __future__ import annotations

import warnings
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from distscale import DistributedGradScaler
from distscale.record import HostCopy

WORLD_SIZE = 2
SCALE = 1024.0
PAIRS = [("adamw-foreach", "sgd-momentum"), ("adamw-fused", "sgd-momentum-fused"), ("adamw-fused", "adamw-loop")]
INF, NAN = float("inf"), float("nan")


def backward(model: nn.Module, rank: int, scale: float = 1.0) -> None:
    """Leaves the gradients of ``scale`` times the loss."""
    for param in model.parameters():
        param.grad = None
    x = torch.linspace(-1.0, 1.0 + rank, 20).view(5, 4)
    (model(x).square().mean() * scale).backward()


def skip_and_step(rank: int) -> dict[str, Any]:
    """C34: a skip as the first step, a step, a skip. Beside it, the same optimizer without any scaler."""
    layouts = {name: ["ddp"] if name == "sgd-momentum-fused" else ["ddp", "fsdp2"] for name in OPTIMIZERS}
    return {f"{name}, {layout}": _skip_and_step(rank, name, layout) for name in OPTIMIZERS for layout in layouts[name]}


def _skip_and_step(rank: int, name: str, layout: str) -> list[Any]:
    seen: list[Any] = []
    models = []
    for _ in range(2):
        inner = tiny_model()
        if layout == "fsdp2":
            fully_shard(inner, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
        models.append(inner if layout == "fsdp2" else DistributedDataParallel(inner))
    model, reference = models
    optimizer, plain = (OPTIMIZERS[name](module.parameters()) for module in models)
    scaler, reducer = counted(init_scale=SCALE, names=model)
    for is_bad in (True, False, True, False, False, True):
        before = snapshot(optimizer)
        backward(model, rank, scaler.get_scale())
        if is_bad and rank == 1:
            poison(next(model.parameters()).grad, INF)
        elif not is_bad:
            backward(reference, rank)
            plain.step()
        report = run_step(scaler, optimizer)
        is_same = snapshot(optimizer) == (before if is_bad else snapshot(plain))
        seen.append((report.skipped, is_same, report.next_scale))
    return [seen, reducer.num_reduces, reducer.num_gathers]


def clipping(rank: int) -> dict[str, Any]:
    """C36: the norm and the clipping are those of the unscaled gradient; beside torch's clip_grad_norm_ in fp32."""
    return {f"{name}, {unscales}": _clipping(rank, name, unscales) for name in OPTIMIZERS for unscales in (False, True)}


def _clipping(rank: int, name: str, unscales: bool) -> list[Any]:
    model, reference = (DistributedDataParallel(tiny_model()) for _ in range(2))
    optimizer, plain = (OPTIMIZERS[name](module.parameters()) for module in (model, reference))
    scaler, _ = counted(init_scale=SCALE, max_norm=0.1)
    seen = []
    for _ in range(3):
        backward(model, rank, SCALE)
        backward(reference, rank)
        scaler.scale(torch.ones(()))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
        report = scaler.last_step
        assert report is not None
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        is_close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
        seen.append((report.grad_norm, float(norm), report.clip_coef, is_close))
    return seen


class CountSyncs(TorchDispatchMode):
    """Counts the operators that make the host wait for a device."""

    SYNCING = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        self.num_syncs += func.name().split(".")[0] in self.SYNCING
        return func(*args, **(kwargs or {}))


def syncs(rank: int) -> dict[str, Any]:
    """G4. On the CPU a copy has always arrived; it is said to be on its way here, as from a device."""
    return {name: _syncs(rank, name) for name in OPTIMIZERS}


def _syncs(rank: int, name: str) -> dict[str, Any]:
    model = DistributedDataParallel(tiny_model())
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler, reducer = counted(init_scale=SCALE, max_norm=1.0)
    for _ in range(2):
        backward(model, rank, SCALE)
        run_step(scaler, optimizer)
    copies: list[HostCopy] = []
    is_instant, read = HostCopy.is_instant, HostCopy.read
    HostCopy.is_instant = property(lambda self: False)  # type: ignore[method-assign, assignment]
    HostCopy.read = lambda self: copies.append(self) or read(self)  # type: ignore[method-assign, func-returns-value]
    num_steps, num_reads, scales = 4, 0, []
    try:
        with CountSyncs() as counter:
            for step in range(num_steps):
                if step == 2 and rank == 1:  # and it stays
                    poison(next(model.parameters()).grad, INF)
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                decision = scaler._decisions[-1]
                scaler.update()
                # An earlier decision may be read by now; waiting for this one would hold up the host.
                num_reads += any(copy is decision._copy for copy in copies)
                scales.append(scaler._get_scale_async().clone())
    finally:
        HostCopy.is_instant, HostCopy.read = is_instant, read  # type: ignore[method-assign]
    # Seeing nothing must not come from looking at nothing.
    with CountSyncs() as control:
        bool(torch.ones(()) > 0)
    report = scaler.last_step
    assert report is not None
    return {
        "syncs": counter.num_syncs,
        "has_seen": counter.num_calls > 50 and control.num_syncs == 1,
        "reads": num_reads,
        "scales": [float(scale) for scale in scales],
        "exchanges": reducer.num_reduces,
        "last": (report.step, report.skipped),
    }


class LargestNew(TorchDispatchMode):
    """Largest block of memory that an operator newly allocated, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, Tensor)]
        known = {arg.untyped_storage().data_ptr() for arg in inputs}
        for new in torch.utils._pytree.tree_leaves(result):
            if isinstance(new, Tensor) and new.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, new.untyped_storage().nbytes())
        return result


def c33(rank: int) -> list[int]:
    """Largest temporary of a whole step, for gradients of 4 and of 16 MiB."""
    found = []
    for numel in (1 << 20, 1 << 22):
        param = nn.Parameter(torch.ones(numel))
        param.grad = torch.ones(numel)
        optimizer = SGD([param], lr=1e-2, foreach=True)
        scaler, _ = counted(init_scale=SCALE, max_norm=1.0)
        scaler.scale(torch.ones(()))
        with LargestNew() as largest:
            scaler.step(optimizer)
            scaler.update()
        found.append(largest.num_bytes)
    return found


# ---------------------------------------------------------------- several optimizers, schedulers, accumulation


def two_optimizers(rank: int) -> dict[str, Any]:
    """All or none, in one exchange; each of them in turn has the bad value, on one rank."""
    seen: dict[str, Any] = {}
    for kinds in PAIRS:
        params = [nn.Parameter(torch.ones(3)) for _ in kinds]
        optimizers = [OPTIMIZERS[kind]([param]) for kind, param in zip(kinds, params, strict=True)]
        scaler, reducer = counted(init_scale=SCALE, max_norm=INF, growth_interval=1000)
        steps = []
        for bad in (None, 0, 1, None):
            for index, param in enumerate(params):
                set_grad(param, torch.full((3,), SCALE * (index + 1)))
                if index == bad and rank == 0:
                    poison(param.grad, INF)
            before = [snapshot(optimizer) for optimizer in optimizers]
            report = run_step(scaler, *optimizers)
            moved = [snapshot(optimizer) != old for optimizer, old in zip(optimizers, before, strict=True)]
            steps.append(
                (report.skipped, moved, report.grad_norm * scaler.get_scale() / SCALE if bad is None else None)
            )
        seen[" + ".join(kinds)] = (steps, reducer.num_reduces, reducer.num_gathers)
    return seen


def c16(rank: int) -> dict[str, Any]:
    """Two optimizers, ``update()`` between them, the first one overflowing: what gradient does the second one get?"""
    seen: dict[str, Any] = {}
    for kind in ("sgd", "sgd-fused"):
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizers: list[Optimizer] = [SGD([param], lr=1.0, fused=kind == "sgd-fused") for param in params]
        scaler, _ = counted(init_scale=SCALE)
        reports = []
        for bad_rank in (None, 1, 0, None):
            for param in params:
                param.grad = None
                param.data.zero_()
            # The gradient of each loss is 3, whatever the scale.
            scaler.scale(sum(param.sum() * 3.0 for param in params)).backward()
            if rank == bad_rank:
                poison(params[0].grad, INF)
            for optimizer in optimizers:
                scaler.step(optimizer)
                scaler.update()
            reports.append((scaler.get_scale(), params[0].tolist(), params[1].tolist()))
        seen[kind] = reports
    return seen


def c14(rank: int) -> dict[str, Any]:
    """The first step overflows, on one rank; the learning rate must not move, and torch must not warn."""
    seen: dict[str, Any] = {}
    for name in ("adamw-foreach", "adamw-fused"):
        model = DistributedDataParallel(tiny_model())
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        scaler = DistributedGradScaler("cpu", init_scale=SCALE)
        rates = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                backward(model, rank, scaler.get_scale())
                if step in (0, 2) and rank == 1:
                    poison(next(model.parameters()).grad, INF)
                report = run_step(scaler, optimizer)
                if not report.skipped:
                    scheduler.step()
                rates.append(scheduler.get_last_lr()[0])
        seen[name] = rates
    return seen


def accumulation(rank: int) -> list[Any]:
    """Micro-batches before one step, one with an inf on one rank; then the sum of clean ones is stepped, once."""
    model = DistributedDataParallel(tiny_model())
    optimizer = SGD(model.parameters(), lr=1.0)
    scaler, reducer = counted(init_scale=SCALE, names=model)
    seen = []
    for bad_micro_batch in (1, None):
        optimizer.zero_grad()
        before = snapshot(optimizer)
        for micro_batch in range(3):
            x = torch.linspace(-1.0, 1.0 + rank + micro_batch, 20).view(5, 4)
            scaler.scale(model(x).square().mean() / 3).backward()
            if micro_batch == bad_micro_batch and rank == 1:
                poison(next(model.parameters()).grad, INF)
        scaler.step(optimizer)
        scaler.update()
        report = scaler.last_step
        assert report is not None
        seen.append((report.step, report.skipped, report.scale, snapshot(optimizer) == before))
    return [seen, reducer.num_reduces]


def after_unscaling(rank: int) -> dict[str, Any]:
    """Two optimizers, the first one unscaled by hand; then a rank's own code changes or spoils its gradients."""
    seen: dict[str, Any] = {}
    for kinds in PAIRS:
        params = [nn.Parameter(torch.ones(3)) for _ in kinds]
        optimizers = [OPTIMIZERS[kind]([param]) for kind, param in zip(kinds, params, strict=True)]
        scaler, reducer = counted(init_scale=SCALE, max_norm=INF, names={"first": params[0], "second": params[1]})
        steps = []
        for factor in (1.0, 2.0, INF, NAN, 0.5):
            scale = scaler.get_scale()
            for index, param in enumerate(params):
                set_grad(param, torch.full((3,), scale * (index + 1)))
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizers[0])
            assert params[0].grad is not None
            is_unscaled = params[0].grad.tolist() == [1.0] * 3
            params[0].grad.mul_(factor if rank == 1 or factor in (2.0, 0.5) else 1.0)
            before = [snapshot(optimizer) for optimizer in optimizers]
            scaler.step(*optimizers)
            scaler.update()
            report = scaler.last_step
            assert report is not None
            moved = [snapshot(optimizer) != old for optimizer, old in zip(optimizers, before, strict=True)]
            culprit = report.culprit and (report.culprit.rank, report.culprit.tensor, report.culprit.kind)
            norm = None if report.skipped else report.grad_norm
            steps.append((is_unscaled, report.skipped, culprit, moved, norm, scaler.get_scale()))
        seen[" + ".join(kinds)] = (steps, reducer.num_reduces)
    return seen


# ---------------------------------------------------------------- policies


def policies(rank: int) -> dict[str, Any]:
    """Five steps, the third with an inf on one rank: (skipped, scale after it, moved) of each."""
    choices: dict[str, dict[str, Any]] = {
        "none": {"policy": "none", "max_norm": 1.0},
        "static": {"policy": "static", "init_scale": 64.0},
        "dynamic": {"init_scale": 64.0, "growth_interval": 2},
        "hysteresis": {"init_scale": 64.0, "hysteresis": 2},
    }
    seen: dict[str, Any] = {}
    for name, arguments in choices.items():
        # BF16 parameters and gradients, which is what policy "none" is for.
        model = tiny_model(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=0.1)
        scaler, reducer = counted(names=model, **arguments)
        steps = []
        for step in range(5):
            before, scale = snapshot(optimizer), scaler.get_scale()
            for param in model.parameters():
                param.grad = torch.full_like(param, 2.0**-7 * scale)
            if step in (2, 3) and rank == 1:
                poison(model[2].weight.grad, INF)
            report = run_step(scaler, optimizer)
            steps.append((report.skipped, scaler.get_scale(), snapshot(optimizer) != before))
        norm = report.grad_norm
        loss = torch.ones((), dtype=torch.bfloat16)
        seen[name] = (steps, reducer.num_reduces, norm, float(scaler.scale(loss)), scaler.scale(loss).dtype)

    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), INF if rank == 1 else 0.5)
    scaler, reducer = counted(enabled=False)
    loss = torch.ones(())
    same = scaler.scale(loss) is loss
    scaler.step(SGD([param], lr=1.0))
    scaler.update()
    seen["disabled"] = (same, reducer.num_reduces, scaler.last_step.skipped, scaler.state_dict())
    return {"seen": seen, "disabled values": param.tolist()}


def c17(rank: int) -> tuple[str, str]:
    param = nn.Parameter(torch.ones(2))
    set_grad(param, torch.ones(2))
    optimizer = SGD([param], lr=1.0)
    scaler, _ = counted(init_scale=SCALE)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return error_of(lambda: scaler.unscale_(optimizer))


CASES = [skip_and_step, clipping, syncs, c33, two_optimizers, after_unscaling, c16, c14, accumulation, policies, c17]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case(CASES, WORLD_SIZE)


def test_c34_a_skip_touches_nothing_and_a_step_is_exact(results: dict[str, list[Any]]) -> None:
    seen = on_all(results["skip_and_step"])
    assert len(seen) == 2 * len(OPTIMIZERS) - 1
    for name, (steps, num_reduces, num_gathers) in seen.items():
        assert [skipped for skipped, _, _ in steps] == [True, False, True, False, False, True], name
        assert all(is_same for _, is_same, _ in steps), name
        assert [scale for _, _, scale in steps] == [SCALE / 2, SCALE / 2, *[SCALE / 4] * 3, SCALE / 8], name
        assert (num_reduces, num_gathers) == (6, 1), name


def test_c36_clips_the_unscaled_gradient(results: dict[str, list[Any]]) -> None:
    for name, steps in on_all(results["clipping"]).items():
        for norm, reference, coef, is_close in steps:
            assert reference > 0.1
            assert norm == pytest.approx(reference, rel=1e-6), name
            assert coef == pytest.approx(0.1 / reference, rel=1e-4), name
            assert is_close, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers_never_wait_for_the_device(results: dict[str, list[Any]], name: str) -> None:
    for seen in (rank_seen[name] for rank_seen in results["syncs"]):
        assert seen["has_seen"]
        # Beside the fused path, the one wait is the read of the decision's copy, once a step.
        assert seen["reads"] == (0 if name.endswith("fused") else 4)
        assert seen["scales"] == [SCALE, SCALE, SCALE / 2, SCALE / 4]
        assert seen["exchanges"] == 6
        assert seen["last"] == (5, True)
        if name.endswith("fused"):
            assert seen["syncs"] == 0


def test_c33_no_temporary_of_the_gradients_size(results: dict[str, list[Any]]) -> None:
    for small, large in results["c33"]:
        assert 0 < small == large < 4 << 20


def test_two_optimizers_step_together_or_not_at_all(results: dict[str, list[Any]]) -> None:
    norm = pytest.approx((3 * 1 + 3 * 4) ** 0.5, rel=1e-6)
    for kinds, (steps, num_reduces, num_gathers) in on_all(results["two_optimizers"]).items():
        (skips, moved, first), second, third, (last_skips, last_moved, last) = steps
        assert (skips, moved, first) == (False, [True, True], norm), kinds
        assert second == third == (True, [False, False], None), kinds
        assert (last_skips, last_moved, last) == (False, [True, True], norm), kinds
        assert (num_reduces, num_gathers) == (4, 1), kinds


def test_a_gradient_spoiled_after_unscaling(results: dict[str, list[Any]]) -> None:
    for kinds, (steps, num_reduces) in on_all(results["after_unscaling"]).items():
        is_unscaled, skipped, culprits, moved, norms, scales = zip(*steps, strict=True)
        assert all(is_unscaled), kinds
        assert skipped == (False, False, True, True, False), kinds
        assert culprits == (None, None, (1, "first", "inf"), (1, "first", "nan"), None), kinds
        assert moved == ([True] * 2, [True] * 2, [False] * 2, [False] * 2, [True] * 2), kinds
        wanted = [pytest.approx((3 * factor**2 + 3 * 4) ** 0.5, rel=1e-6) for factor in (1.0, 2.0, 0.5)]
        assert [norm for norm in norms if norm is not None] == wanted, kinds
        assert scales == (SCALE, SCALE, SCALE / 2, SCALE / 4, SCALE / 4), kinds
        assert num_reduces == 5, kinds


def test_c16_update_between_two_optimizers(results: dict[str, list[Any]]) -> None:
    stepped, skipped = [-3.0, -3.0], [0.0, 0.0]
    wanted = [(SCALE, stepped), (SCALE / 2, skipped), (SCALE / 4, skipped), (SCALE / 4, stepped)]
    for steps in on_all(results["c16"]).values():
        assert steps == [(scale, first, stepped) for scale, first in wanted]


def test_c14_the_learning_rate_does_not_move_on_a_skip(results: dict[str, list[Any]]) -> None:
    for rates in on_all(results["c14"]).values():
        assert rates == [1e-2, 0.5e-2, 0.5e-2, 0.25e-2]


def test_accumulated_micro_batches_are_one_step(results: dict[str, list[Any]]) -> None:
    steps, num_reduces = on_all(results["accumulation"])
    assert steps == [(0, True, SCALE, True), (1, False, SCALE / 2, False)]
    assert num_reduces == 2


def test_policies(results: dict[str, list[Any]]) -> None:
    seen = on_all([rank_seen["seen"] for rank_seen in results["policies"]])
    scales = {
        "none": [1.0] * 5,
        "static": [64.0] * 5,
        "dynamic": [64.0, 128.0, 64.0, 32.0, 32.0],
        "hysteresis": [64.0, 64.0, 64.0, 32.0, 32.0],
    }
    for name, wanted in scales.items():
        steps, num_reduces, norm, scaled_loss, dtype = seen[name]
        assert [skipped for skipped, _, _ in steps] == [False, False, True, True, False], name
        assert [scale for _, scale, _ in steps] == wanted, name
        assert [moved for _, _, moved in steps] == [True, True, False, False, True], name
        assert num_reduces == 5
        assert scaled_loss == wanted[-1]
        assert dtype is torch.float32
        # 4*7 + 7 + 7*2 + 2 + 2 + 1 values of 2**-7
        assert norm == (pytest.approx(54**0.5 * 2.0**-7, rel=1e-6) if name == "none" else None)
    assert seen["disabled"] == (True, 0, False, {})
    # It just steps, on each rank.
    assert [rank_seen["disabled values"] for rank_seen in results["policies"]] == [[0.5, 0.5], [-INF, -INF]]


def test_c17_unscale_twice_is_a_clear_error(results: dict[str, list[Any]]) -> None:
    kind, text = on_all(results["c17"])
    assert kind == "ProtocolError"
    assert "max_norm=" in text
