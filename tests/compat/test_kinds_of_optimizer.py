"""Optimizers of every kind: a skip leaves no trace in them, a step is the one they take on unscaled gradients."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from schedulefree import ScheduleFreeWrapper
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop, lr_scheduler

from distscale import DistributedGradScaler, LocalReducer, ProtocolError
from ranks import CountingReducer

INF = math.inf


def schedule_free(params: Any) -> Any:
    # A wrapper that is no torch.optim.Optimizer: it has a base, and what that has are its own.
    wrapper = ScheduleFreeWrapper(SGD(params, lr=0.1), momentum=0.9)
    wrapper.train()
    return wrapper


KINDS: dict[str, Callable[[Any], Any]] = {
    "adafactor": lambda params: Adafactor(params, lr=0.1),
    "adafactor, foreach": lambda params: Adafactor(params, lr=0.1, foreach=True),
    "adagrad, fused": lambda params: Adagrad(params, lr=0.1, fused=True),
    "adam, amsgrad, fused": lambda params: Adam(params, lr=0.1, amsgrad=True, fused=True),
    "adam, lr in a tensor": lambda params: Adam(params, lr=torch.tensor(0.1), foreach=False),
    "muon": lambda params: Muon(params, lr=0.1),
    "rmsprop, centered": lambda params: RMSprop(params, lr=0.1, centered=True, momentum=0.5),
    "schedule-free": schedule_free,
    "sgd, nesterov, fused": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 4), (4, 3))]


def loss_of(params: Sequence[Tensor], index: int) -> Tensor:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(index))
    loss: Tensor = (x @ params[0]).tanh().matmul(params[1]).square().mean()
    return loss


def bits(*optimizers: Any) -> bytes:
    """Of all parameters, of all state and of what stands in the groups."""
    seen: list[bytes] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            seen.append(repr(sorted(settings.items(), key=lambda item: item[0])).encode())
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                for tensor in (param, *(torch.as_tensor(state[key]) for key in sorted(state))):
                    seen.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
                seen.append(",".join(sorted(state)).encode())
    return b"|".join(seen)


def step(scaler: DistributedGradScaler, optimizer: Any, params: Sequence[Tensor], index: int, bad: float = 0.0) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(params, index)).backward()
    if bad:
        params[0].grad.view(-1)[0] = bad  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("bad", [INF, math.nan])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_skips_and_steps(name: str, unscales: bool, bad: float) -> None:
    params, plain_params = matrices(), matrices()
    optimizer, plain = KINDS[name](params), KINDS[name](plain_params)
    scaler = DistributedGradScaler("cpu")
    for index, value in enumerate((bad, 0.0, bad, 0.0, 0.0, bad)):
        before = bits(optimizer)
        optimizer.zero_grad()
        scaler.scale(loss_of(params, index)).backward()
        if value:
            params[0].grad.view(-1)[0] = value  # type: ignore[union-attr]
        else:
            plain.zero_grad()
            loss_of(plain_params, index).backward()
            plain.step()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert bits(optimizer) == (before if value else bits(plain))
        assert scaler.last_step is not None
        assert scaler.last_step.skipped is bool(value)
    assert scaler.get_scale() == 2.0**13


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by torch's own compiler
def test_step_that_was_compiled_as_capturable() -> None:
    # Capturable steps run on accelerators, or compiled.
    params, plain_params = matrices(), matrices()
    optimizer, plain = (AdamW(each, lr=0.1, capturable=True) for each in (params, plain_params))
    for each in (optimizer, plain):
        each.step = torch.compile(each.step, backend="eager")  # type: ignore[method-assign]
    scaler = DistributedGradScaler("cpu")
    for index, bad in enumerate((INF, 0.0, INF, 0.0)):
        before = bits(optimizer)
        step(scaler, optimizer, params, index, bad)
        if not bad:
            plain.zero_grad()
            loss_of(plain_params, index).backward()
            plain.step()
        assert bits(optimizer) == (before if bad else bits(plain))


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_run_when_the_step_does(fused: bool) -> None:
    params = matrices()
    optimizer = AdamW(params, lr=0.1, fused=fused)
    seen: list[str] = []
    gradients: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_step_post_hook(lambda *_: gradients.append(params[0].grad.clone()))  # type: ignore[union-attr]
    scaler = DistributedGradScaler("cpu")
    counts = []
    for index, bad in enumerate((INF, 0.0, 0.0, INF)):
        step(scaler, optimizer, params, index, bad)
        counts.append(len(seen))
    # A fused optimizer that has stepped before is called on a skip too, and does nothing: that is how torch has it.
    assert counts == ([0, 2, 4, 6] if fused else [0, 2, 4, 4])
    assert seen == ["before", "after"] * (counts[-1] // 2)
    expected = matrices()
    loss_of(expected, 1).backward()
    torch.testing.assert_close(gradients[0], expected[0].grad, rtol=0, atol=0)  # unscaled


@pytest.mark.parametrize(
    "make_schedule",
    [lambda o: lr_scheduler.StepLR(o, 1, 0.5), lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)],
)
@pytest.mark.parametrize("fused", [False, True])
def test_schedule_that_steps_after_every_applied_step(fused: bool, make_schedule: Callable[[Any], Any]) -> None:
    params, plain_params = matrices(), matrices()
    optimizer, plain = (SGD(each, lr=0.1, momentum=0.9, fused=fused) for each in (params, plain_params))
    schedule, plain_schedule = make_schedule(optimizer), make_schedule(plain)
    scaler = DistributedGradScaler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index, bad in enumerate((INF, INF, 0.0, 0.0, INF, 0.0)):
            step(scaler, optimizer, params, index, bad)
            assert scaler.last_step is not None
            if not scaler.last_step.skipped:
                schedule.step()
                plain.zero_grad()
                loss_of(plain_params, index).backward()
                plain.step()
                plain_schedule.step()
            assert bits(optimizer) == bits(plain) or index < 2
    assert schedule.get_last_lr() == plain_schedule.get_last_lr()


# ---------------------------------------------------------------- one parameter, two optimizers


ORDERS = {
    "together": [(0, 1)],
    "apart": [(0,), (1,)],
    "apart, the other way round": [(1,), (0,)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("unscales", [(), (0,), (1,), (0, 1), (1, 0)])
@pytest.mark.parametrize("fused", [(False, False), (True, True), (False, True), (True, False)])
def test_gradient_of_a_shared_parameter_is_unscaled_once(
    fused: tuple[bool, bool], unscales: tuple[int, ...], order: str
) -> None:
    seen = []
    for is_scaled in (True, False):
        shared, first, second = (nn.Parameter(torch.tensor([float(value)])) for value in (1, 2, 3))
        optimizers = [
            SGD([shared, first], lr=0.5, fused=fused[0]),
            SGD([second, shared], lr=0.25, momentum=0.5, fused=fused[1]),
        ]
        scaler = DistributedGradScaler("cpu", init_scale=1024.0, names={"shared": shared})
        trace = []
        for bad in (0.0, 0.0, INF, 0.0, 0.0):
            if bad and not is_scaled:
                trace.append(trace[-1])
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (shared * first * 0.5 + shared * second * 0.25 + second).sum()
            if not is_scaled:
                loss.backward()
                for group in ORDERS[order]:
                    for index in group:
                        optimizers[index].step()
            else:
                scaler.scale(loss).backward()
                if bad:
                    shared.grad.fill_(bad)  # type: ignore[union-attr]
                for index in unscales:
                    scaler.unscale_(optimizers[index])
                for group in ORDERS[order]:
                    scaler.step(*(optimizers[index] for index in group))
                scaler.update()
            trace.append([param.item() for param in (shared, first, second)])
        seen.append(trace)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_that_meets_a_parameter_later(fused: bool) -> None:
    # The first one has stepped on the device, unread, by the time the second is seen to share its parameter.
    for bad in (0.0, INF):
        shared, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        first = SGD([shared, other], lr=1.0, fused=fused)
        scaler = DistributedGradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            first.zero_grad()
            scaler.scale((shared + other).sum()).backward()
            scaler.step(first)
            scaler.update()
        first.zero_grad()
        scaler.scale((shared + other).sum()).backward()
        if bad:
            other.grad.fill_(bad)  # type: ignore[union-attr]
        scaler.step(first)
        scaler.step(SGD([shared], lr=1.0, fused=fused))
        scaler.update()
        assert (shared.item(), other.item()) == ((-3.0, -2.0) if bad else (-4.0, -3.0))


def test_clip_of_a_shared_gradient() -> None:
    for fused in (False, True):
        shared, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizers = [SGD([shared], lr=1.0, fused=fused), SGD([shared, other], lr=1.0, fused=fused)]
        scaler = DistributedGradScaler("cpu", init_scale=8.0, max_norm=1.0)
        scaler.scale((3 * shared + 4 * other).sum()).backward()
        scaler.step(*optimizers)
        scaler.update()
        assert scaler.last_step is not None
        assert scaler.last_step.grad_norm == pytest.approx(5.0)
        assert (shared.item(), other.item()) == (pytest.approx(-1.2, rel=1e-6), pytest.approx(-0.8, rel=1e-6))


def test_state_that_was_copied_is_independent() -> None:
    # A step on a copy of model and optimizer leaves the scaler's knowledge of the first one as it is.
    params = matrices()
    optimizer = AdamW(params, lr=0.1, fused=True)
    scaler = DistributedGradScaler("cpu")
    for index in range(2):
        step(scaler, optimizer, params, index)
    twin_params = copy.deepcopy(params)
    twin = AdamW(twin_params, lr=0.1, fused=True)
    twin.load_state_dict(optimizer.state_dict())
    before = bits(twin)
    step(scaler, twin, twin_params, 2, INF)
    assert bits(twin) == before
    assert scaler._steps_on_device(optimizer)


class HandsOn:
    """Knows an optimizer, and hands on to it all that it does not know."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.step(*args, **kwargs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_an_object_that_hands_on_to_a_fused_optimizer(fused: bool, max_norm: float | None) -> None:
    """Torch's scaler sets ``grad_scale`` and ``found_inf`` on the object, where the optimizer does not look."""
    param = nn.Parameter(torch.zeros(2))
    wrapper: Any = HandsOn(SGD([param], lr=1.0, fused=fused))
    scaler = DistributedGradScaler("cpu", init_scale=1024.0, max_norm=max_norm)
    values = []
    for bad in (0.0, 0.0, INF):
        param.grad = None
        scaler.scale((param * torch.tensor([3.0, 4.0])).sum()).backward()
        param.grad[0] += bad
        scaler.step(wrapper)
        scaler.update()
        values.append(param.tolist())
    first = [-3.0, -4.0] if max_norm is None else pytest.approx([-0.6, -0.8], rel=1e-5)
    second = [-6.0, -8.0] if max_norm is None else pytest.approx([-1.2, -1.6], rel=1e-5)
    assert values == [first, second, second]


@pytest.mark.parametrize("kind", ["momentum", "amsgrad"])
def test_a_state_that_a_setting_adds_later_is_not_created_by_a_skip(kind: str) -> None:
    param = nn.Parameter(torch.zeros(2000))
    make: Any = {"momentum": SGD, "amsgrad": AdamW}[kind]
    optimizer = make([param], lr=1.0, fused=True)
    scaler = DistributedGradScaler("cpu", init_scale=4.0)
    for bad in (0.0, 0.0, INF):
        if bad:
            optimizer.param_groups[0][kind] = {"momentum": 0.9, "amsgrad": True}[kind]
            before = bits(optimizer)
        param.grad = None
        scaler.scale(param.sum()).backward()
        param.grad[0] += bad
        scaler.step(optimizer)
        scaler.update()
    assert bits(optimizer) == before


def test_a_parameter_whose_first_gradient_is_bad_gets_no_state() -> None:
    # An expert that nothing was sent to before: the fused kernel would leave it memory that nothing was written to.
    params = matrices()
    optimizer = SGD(params, lr=0.1, momentum=0.9, fused=True)
    scaler = DistributedGradScaler("cpu")
    for is_late in (False, False, True):
        optimizer.zero_grad()
        before = bits(optimizer)
        scaler.scale(params[is_late].sum() * (INF if is_late else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert bits(optimizer) == before


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    param = nn.Parameter(torch.zeros(2))
    reducer = CountingReducer(LocalReducer())
    scaler = DistributedGradScaler("cpu", reducer=reducer)
    scaler.scale(param.sum()).backward()
    with pytest.raises(ProtocolError, match=r"LBFGS cannot be stepped by a scaler: its step\(\) needs a closure"):
        scaler.step(torch.optim.LBFGS([param]))
    assert reducer.num_reduces == 0
    scaler.step(SGD([param], lr=1.0))  # goes on
    assert param.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("max_norm", [1.0, INF])
def test_a_norm_beyond_fp64_is_an_overflow(max_norm: float) -> None:
    # It would clip everything to zero, or, where it is only measured, multiply with inf/inf.
    param = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = SGD([param], lr=1.0)
    scaler = DistributedGradScaler("cpu", init_scale=4.0, max_norm=max_norm)
    param.grad = torch.tensor([1e200, 1.0], dtype=torch.float64)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.last_step.skipped, scaler.get_scale(), param.tolist()) == (True, 2.0, [1.0, 1.0])


def test_a_gradient_whose_conjugate_is_in_memory() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    scaler = DistributedGradScaler("cpu", init_scale=4.0)
    for bad in (0.0, INF):
        param.grad = torch.tensor([complex(8, 4), complex(16, bad)]).conj()
        assert param.grad.is_conj()
        scaler.scale(torch.ones(()))
        scaler.step(SGD([param], lr=1.0))
        scaler.update()
        assert param.tolist() == [complex(-2, 1), complex(-4, 0)]
    assert scaler.get_scale() == 2.0
