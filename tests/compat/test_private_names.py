"""Private names that other libraries read, and classes that others derive: they work as with torch's scaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Optimizer

from distscale import Culprit, DistributedGradScaler
from ranks import ThreadReducer, run_threads

BOTH = [GradScaler, DistributedGradScaler]
INF = math.inf


def case(value: float = 1.0, *, fused: bool = False) -> tuple[nn.Parameter, SGD]:
    """A parameter whose scaled gradient, at scale 8, is ``8 * value``."""
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([8.0, 8.0 * value])
    return param, SGD([param], lr=1.0, fused=fused)


@pytest.fixture(params=BOTH, ids=lambda scaler: scaler.__name__)
def scaler(request: pytest.FixtureRequest) -> GradScaler:
    scaler: GradScaler = request.param("cpu", init_scale=8.0)
    assert scaler._scale is scaler._growth_tracker is None  # until the first loss tells the device
    scaler.scale(torch.ones(()))
    return scaler


def test_scale_and_tracker_are_tensors(scaler: GradScaler) -> None:
    _, optimizer = case()
    scale = scaler._scale
    assert scaler._get_scale_async() is scale
    scaler.step(optimizer)
    scaler.update()
    assert scaler._scale is scale  # changed in place, so that a captured graph sees it
    assert scaler._scale is not None and scaler._growth_tracker is not None
    for tensor, dtype, value in ((scaler._scale, torch.float32, 8.0), (scaler._growth_tracker, torch.int32, 1)):
        assert (tensor.shape, tensor.dtype, tensor.item()) == ((), dtype, value)
    assert scaler._check_scale_growth_tracker("a test") == (scaler._scale, scaler._growth_tracker)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("value", [1.0, INF, math.nan])
def test_state_of_an_optimizer_through_a_step(scaler: GradScaler, value: float, unscales: bool, fused: bool) -> None:
    param, optimizer = case(value, fused=fused)
    is_bad = float(not math.isfinite(value))

    def state() -> tuple[OptState, list[tuple[str, Any, float]]]:
        mine = scaler._per_optimizer_states[id(optimizer)]
        assert mine["found_inf_per_device"] is scaler._found_inf_per_device(optimizer)
        return mine["stage"], [
            (device.type, found.shape, found.item()) for device, found in mine["found_inf_per_device"].items()
        ]

    assert state() == (OptState.READY, [])
    if unscales:
        scaler.unscale_(optimizer)
        assert state() == (OptState.UNSCALED, [("cpu", (), is_bad)])
        assert param.grad is not None
        assert param.grad[0] == 1.0
    scaler.step(optimizer)
    assert state() == (OptState.STEPPED, [("cpu", (), is_bad)])
    assert param[0].item() == is_bad - 1.0
    scaler.update()
    assert state() == (OptState.READY, [])
    assert not (is_bad and scaler.get_scale() != 4.0)


@pytest.mark.parametrize("value", [1.0, INF, math.nan])
def test_asking_whether_gradients_are_finite(scaler: GradScaler, value: float) -> None:
    # As hivemind does, before it decides whether to average.
    param, optimizer = case(value)
    found = scaler._check_inf_per_device(optimizer)
    assert [flag.item() for flag in found.values()] == [float(not math.isfinite(value))]
    assert found is scaler._found_inf_per_device(optimizer)
    torch.testing.assert_close(param.grad, torch.tensor([8.0, 8.0 * value]), rtol=0, atol=0, equal_nan=True)
    scaler.step(optimizer)  # and unscales
    assert param[0].item() == (-1.0 if value == 1.0 else 0.0)


@pytest.mark.parametrize("repairs", [nn.utils.clip_grad_value_, lambda params, _: params[0].grad.nan_to_num_(0, 0, 0)])
def test_what_was_not_finite_cannot_be_clamped_away(scaler: GradScaler, repairs: Callable[..., Any]) -> None:
    param, optimizer = case(INF)
    scaler.unscale_(optimizer)
    repairs([param], 1.0)
    assert param.grad is not None
    assert param.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert (param.tolist(), scaler.get_scale()) == ([0.0, 0.0], 4.0)
    if isinstance(scaler, DistributedGradScaler):
        assert scaler.last_step is not None
        assert scaler.last_step.culprit == Culprit(0, "SGD0.group0.param0", "inf")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_flag_that_others_set_counts(scaler: GradScaler, value: float, fused: bool) -> None:
    # As after an all-reduce of the flags by a training loop of one's own.
    param, optimizer = case(fused=fused)
    scaler.unscale_(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(value)
    scaler.step(optimizer)
    scaler.update()
    # torch's fused kernels on the CPU compare with 1: a sum of the flags of two ranks is stepped.
    is_stepped = value == 2.0 and fused and type(scaler) is GradScaler
    assert (param.tolist(), scaler.get_scale()) == ([-1.0, -1.0] if is_stepped else [0.0, 0.0], 4.0)


def reduced_by_hand(reducer: ThreadReducer) -> tuple[list[float], float, Any]:
    rank = reducer.rank
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad = torch.tensor([8.0])
    second.grad = torch.tensor([INF if rank == 1 else 8.0])
    optimizer = SGD([first, second], lr=1.0)
    scaler = DistributedGradScaler("cpu", init_scale=8.0, reducer=reducer, names={"first": first, "second": second})
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    (flag,) = scaler._found_inf_per_device(optimizer).values()
    local = flag.item()
    highest = max(reducer.gather(local))
    flag.fill_(highest)  # what all_reduce(MAX) does
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step is not None
    return [first.item(), second.item()], local, scaler.last_step.culprit


def test_flags_are_local_until_the_step_and_a_reduction_by_hand_does_no_harm() -> None:
    for rank, (values, local, culprit) in enumerate(run_threads(reduced_by_hand, 3)):
        assert values == [0.0, 0.0]
        assert local == float(rank == 1)
        assert culprit == Culprit(1, "second", "inf")


# ---------------------------------------------------------------- what an optimizer is given


class Watching(SGD):
    """Takes part in scaling as fused optimizers do, and notes what it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)
        self._step_supports_amp_scaling = True
        self.given: list[tuple[float | None, float, torch.Size]] = []

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        grad_scale: Tensor | None = self.grad_scale  # type: ignore[attr-defined]
        found_inf: Tensor = self.found_inf  # type: ignore[attr-defined]
        self.given.append((None if grad_scale is None else grad_scale.item(), found_inf.item(), found_inf.shape))
        return "stepped"


@pytest.mark.parametrize("preset", [None, 2.0])
@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scale_and_found_inf(scaler: GradScaler, unscales: bool, preset: float | None) -> None:
    # In the first step: later ones are not asked about before, and see a found_inf of 1.
    param, _ = case()
    optimizer = Watching([param])
    if preset is not None:
        optimizer.grad_scale = torch.tensor(preset)  # type: ignore[attr-defined]
    if unscales:
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer) == "stepped"
    ours = None if unscales else 8.0
    product = preset if ours is None else ours * (preset or 1.0)
    assert optimizer.given == [(product, 0.0, ())]
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_found_inf_reaches_a_fused_optimizer(scaler: GradScaler) -> None:
    param, _ = case()
    optimizer = Watching([param])
    scaler.step(optimizer)
    scaler.update()
    param.grad = torch.tensor([INF, 1.0])
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert optimizer.given == [(8.0, 0.0, ()), (8.0, 1.0, ())]


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
@pytest.mark.parametrize("scaler_class", BOTH)
def test_optimizer_that_takes_the_scaler_differs(scaler_class: type[GradScaler]) -> None:
    class Takes(SGD):
        _step_supports_amp_scaling = True
        given: Any = None

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            self.given = grad_scaler, self.param_groups[0]["params"][0].grad[0].item()

    param, _ = case()
    optimizer = Takes([param])
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert optimizer.given == ((scaler, 8.0) if scaler_class is GradScaler else (None, 1.0))


# ---------------------------------------------------------------- classes derived from it


def derived(base: type[GradScaler]) -> dict[str, type[GradScaler]]:
    """Three ways in which other libraries derive from torch's class."""

    class AllowsFp16(base):  # type: ignore[misc, valid-type]
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    class AsksTheOptimizer(base):  # type: ignore[misc, valid-type]
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            if hasattr(optimizer, "unscale_grads"):
                return optimizer.unscale_grads(*args)
            return super()._unscale_grads_(optimizer, *args)

    class Counts(base):  # type: ignore[misc, valid-type]
        count = 0

        def unscale_(self, optimizer: Any) -> None:
            self.count += 1
            super().unscale_(optimizer)

    return {"fp16": AllowsFp16, "asks": AsksTheOptimizer, "counts": Counts}


class KeepsGradients(Optimizer):
    """Its gradients are not in ``grad``: it has buffers of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.buffer = torch.zeros(2)
        self.num_steps = 0

    def unscale_grads(self, inv_scale: Tensor, found_inf: Tensor, *_: Any) -> dict[torch.device, Tensor]:
        self.buffer *= inv_scale
        return {found_inf.device: torch.maximum(found_inf, (~self.buffer.isfinite().all()).float())}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for param in self.param_groups[0]["params"]:
            param.data -= self.buffer


@pytest.fixture(params=BOTH, ids=lambda scaler: scaler.__name__)
def subclasses(request: pytest.FixtureRequest) -> dict[str, type[GradScaler]]:
    return derived(request.param)


def test_subclass_that_allows_fp16(subclasses: dict[str, type[GradScaler]]) -> None:
    param = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    scaler = subclasses["fp16"]("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for grad, expected in ((8.0, -1.0), (INF, -1.0)):
        param.grad = torch.full((1,), grad, dtype=torch.float16)
        scaler.step(SGD([param], lr=1.0))
        scaler.update()
        assert param.item() == expected


@pytest.mark.parametrize("unscales", [False, True])
def test_subclass_that_asks_the_optimizer(subclasses: dict[str, type[GradScaler]], unscales: bool) -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = KeepsGradients([param])
    scaler = subclasses["asks"]("cpu", init_scale=8.0)
    scales = []
    for value in (8.0, INF, math.nan, 4.0):
        scaler.scale(torch.ones(()))
        optimizer.buffer = torch.tensor([8.0, value])
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 2.0, 2.0]
    assert optimizer.num_steps == 2
    assert param.tolist() == [-1.0 - 4.0, -1.0 - 2.0]


def test_subclass_whose_unscale_is_its_own(subclasses: dict[str, type[GradScaler]]) -> None:
    param, optimizer = case()
    scaler: Any = subclasses["counts"]("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert (scaler.count, param.tolist()) == (1, [-1.0, -1.0])


def raises_on_one_rank(reducer: ThreadReducer) -> str:
    class Fails(DistributedGradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            if reducer.rank == 1:
                raise KeyError("a buffer")
            return super()._unscale_grads_(*args)

    _, optimizer = case()
    scaler = Fails("cpu", reducer=reducer)
    scaler.scale(torch.ones(()))
    with pytest.raises((KeyError, RuntimeError)) as error:
        scaler.step(optimizer)
    return str(error.value)


def test_subclass_that_fails_on_one_rank_ends_all() -> None:
    texts = run_threads(raises_on_one_rank, 3)
    assert "a buffer" in texts[1]
    assert "rank 1" in texts[0] and texts[0] == texts[2]


# ---------------------------------------------------------------- how step is called


def test_step_with_none_for_the_closure(scaler: GradScaler) -> None:
    # As Accelerate calls it.
    param, optimizer = case()
    scaler.step(optimizer, None)
    assert param.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("scaler_class", BOTH)
def test_none_by_keyword_differs(scaler_class: type[GradScaler]) -> None:
    param, optimizer = case()
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    if scaler_class is GradScaler:
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=None)
    else:
        scaler.step(optimizer, closure=None)
        assert param.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("scaler_class", BOTH)
def test_further_arguments_go_by_keyword(scaler_class: type[GradScaler]) -> None:
    class Takes(SGD):
        def step(self, closure: Any = None, *, factor: int = 0) -> int:  # type: ignore[override]
            return factor

    param, _ = case()
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    assert scaler.step(Takes([param]), factor=3) == 3


def test_a_step_that_is_watched_is_not_called_on_a_skip(scaler: GradScaler) -> None:
    # Accelerate takes a step that was not called for a skipped one. With a fused optimizer torch calls it all the same.
    param, optimizer = case(fused=True)
    called = []
    inner = optimizer.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return inner(*args, **kwargs)

    seen = []
    for value in (1.0, 1.0, INF, 1.0):
        optimizer.step = watched  # type: ignore[method-assign]
        param.grad = torch.tensor([8.0, value])
        scaler.scale(torch.ones(()))
        called.clear()
        scaler.step(optimizer)
        optimizer.step = inner  # type: ignore[method-assign]
        scaler.update()
        seen.append(bool(called))
    assert seen == [True, True, type(scaler) is GradScaler, True]


def test_a_learning_rate_schedule_is_no_watcher() -> None:
    param, optimizer = case(fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = DistributedGradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        param.grad = torch.tensor([8.0, 8.0])
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    assert scaler._steps_on_device(optimizer)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc, return-value]
    assert not scaler._steps_on_device(optimizer)
