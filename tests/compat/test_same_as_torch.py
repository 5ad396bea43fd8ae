"""What torch's GradScaler does in one process, ours does: each test runs on both classes.

Where they differ on purpose a test has "differs" in its name and states both values; the README has a row for each.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer

from distscale import ConfigError, DistributedGradScaler

BOTH = [GradScaler, DistributedGradScaler]
MakeScaler = Callable[..., GradScaler]
INF = math.inf


@pytest.fixture(params=BOTH, ids=lambda scaler: scaler.__name__)
def make(request: pytest.FixtureRequest) -> MakeScaler:
    def make(*args: Any, **kwargs: Any) -> GradScaler:
        scaler: GradScaler = request.param("cpu", *args, **kwargs)
        return scaler

    return make


@pytest.fixture(params=[*BOTH, ShardedGradScaler], ids=lambda scaler: scaler.__name__)
def local_scaler(request: pytest.FixtureRequest) -> GradScaler:
    """For what no class exchanges."""
    scaler: GradScaler = request.param("cpu")
    return scaler


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def flags(scaler: GradScaler, optimizer: Optimizer) -> list[float]:
    return [float(flag) for flag in scaler._found_inf_per_device(optimizer).values()]


# ---------------------------------------------------------------- scaling, unscaling


def test_outputs_of_any_nesting_are_scaled(make: MakeScaler) -> None:
    scaler = make(init_scale=8.0)
    one, two = torch.ones(()), torch.full((3,), 2.0)
    scaled = scaler.scale([one, (two, [one])])
    assert type(scaled) is list and type(scaled[1]) is tuple and type(scaled[1][1]) is list
    assert (scaled[0].item(), scaled[1][0].tolist(), scaled[1][1][0].item()) == (8.0, [16.0] * 3, 8.0)
    assert [item.item() for item in scaler.scale(tensor for tensor in (one, one))] == [8.0, 8.0]


MIXED: dict[str, Callable[[], Tensor]] = {
    "fp32": lambda: torch.full((7, 6), 4.0),
    "transposed": lambda: torch.full((6, 7), 4.0).t(),
    "columns": lambda: torch.full((7, 9), 4.0)[:, :6],
    "every second": lambda: torch.full((14, 6), 4.0)[::2],
    "fp16": lambda: torch.full((7, 6), 4.0, dtype=torch.float16),
    "bf16": lambda: torch.full((7, 6), 4.0, dtype=torch.bfloat16),
    "fp64": lambda: torch.full((7, 6), 4.0, dtype=torch.float64),
    "empty": lambda: torch.empty(0, 6),
}


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
@pytest.mark.parametrize("place", [None, *(name for name in MIXED if name != "empty")])
def test_gradients_of_all_dtypes_and_strides_in_one_call(
    local_scaler: GradScaler, place: str | None, bad: float
) -> None:
    grads = {name: build() for name, build in MIXED.items()}
    params = [torch.empty_like(grad, requires_grad=True) for grad in grads.values()]
    for param, grad in zip(params, grads.values(), strict=True):
        param.grad = grad
    if place is not None:
        grads[place][3, 2] = bad
    optimizer = SGD([*params, torch.ones(2, requires_grad=True)], lr=1.0)  # the last has no gradient
    local_scaler.scale(torch.ones(()))
    found = local_scaler._unscale_grads_(optimizer, torch.tensor([0.25]), torch.zeros(1), True)
    assert [(device.type, flag.shape, flag.item()) for device, flag in found.items()] == [
        ("cpu", (1,), float(place is not None))
    ]
    for name, grad in grads.items():
        expected = torch.ones_like(grad)
        if name == place:
            expected[3, 2] = bad
        torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, of checked ones
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [0.0, INF, math.nan])
def test_sparse_gradients(local_scaler: GradScaler, dtype: torch.dtype, bad: float) -> None:
    indices, values = torch.tensor([[1, 0, 1], [2, 1, 2]]), torch.tensor([8.0, 16.0, 4.0 + bad], dtype=dtype)
    param = nn.Parameter(torch.zeros(2, 4, dtype=dtype))
    param.grad = torch.sparse_coo_tensor(indices, values, (2, 4), check_invariants=True)
    dense = param.grad.to_dense()
    found = local_scaler._unscale_grads_(SGD([param], lr=1.0), torch.tensor(0.5), torch.zeros(()), True)
    assert [flag.item() for flag in found.values()] == [float(bad != 0)]
    torch.testing.assert_close(param.grad.to_dense(), dense / 2, rtol=0, atol=0, equal_nan=True)


def test_sparse_values_that_are_finite_apart_and_infinite_together(local_scaler: GradScaler) -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    values = torch.full((2,), 50000.0, dtype=torch.float16)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3,), check_invariants=True)
    found = local_scaler._unscale_grads_(SGD([param], lr=1.0), torch.tensor(0.5), torch.zeros(()), True)
    assert [flag.item() for flag in found.values()] == [1.0]


@pytest.mark.parametrize("scaler_class", BOTH)
def test_fp16_gradients_differ(scaler_class: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad = torch.full((2,), 8.0, dtype=torch.float16)
    optimizer = SGD([param], lr=1.0)
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    if scaler_class is GradScaler:
        with pytest.raises(ValueError, match="FP16"):
            scaler.unscale_(optimizer)
    else:
        scaler.unscale_(optimizer)
        assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("scaler_class", BOTH)
def test_fp16_loss_differs(scaler_class: MakeScaler) -> None:
    scaled = scaler_class("cpu").scale(torch.ones(1, dtype=torch.float16))
    assert (scaled.dtype, scaled.item()) == (
        (torch.float16, INF) if scaler_class is GradScaler else (torch.float32, 65536.0)
    )


# ---------------------------------------------------------------- the scale


def test_scale_over_many_steps(make: MakeScaler) -> None:
    scaler = make(init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    param = nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0)
    seen = []
    for bad in (0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if bad:
            param.grad.fill_(INF)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    wanted = [(64, 1), (64, 2), (16, 0), (16, 1), (16, 2), (64, 0), (64, 1), (64, 2), (16, 0), (4, 0), (4, 1)]
    assert seen == wanted
    assert param.item() == -8.0


@pytest.mark.parametrize("is_tensor", [False, True])
def test_scale_by_hand(make: MakeScaler, is_tensor: bool) -> None:
    scaler = make(init_scale=4.0)
    scaler.scale(torch.ones(()))
    new_scale = torch.tensor(32.0) if is_tensor else 32.0
    scaler.update(new_scale)
    if isinstance(new_scale, Tensor):
        new_scale.fill_(5.0)  # the scaler has a copy
    assert scaler.get_scale() == 32.0


def test_scale_does_not_become_infinite(make: MakeScaler) -> None:
    scaler = make(init_scale=2.0**125, growth_factor=16.0, growth_interval=1)
    param = nn.Parameter(torch.zeros(1))
    optimizer = Adam([param])
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale((param * 1e-30).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert math.isfinite(scaler.get_scale())


@pytest.mark.parametrize("scaler_class", BOTH)
def test_range_of_the_scale_differs(scaler_class: MakeScaler) -> None:
    if scaler_class is GradScaler:
        assert scaler_class("cpu", init_scale=1e38).get_scale() == 1e38
    else:
        with pytest.raises(ConfigError, match=r"init_scale=1e\+38 is not allowed"):
            scaler_class("cpu", init_scale=1e38)


@pytest.mark.parametrize("scaler_class", BOTH)
def test_errors_of_the_constructor_differ(scaler_class: MakeScaler) -> None:
    for argument in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        with pytest.raises(AssertionError if scaler_class is GradScaler else ValueError):
            scaler_class("cpu", **argument)


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("source", BOTH)
def test_state_dict_travels_between_the_classes(make: MakeScaler, source: MakeScaler, is_used: bool) -> None:
    old, new = source("cpu", 4.0, 3.0, 0.25, 7), make(init_scale=9.0)
    old._init_growth_tracker = 5
    if is_used:
        old.scale(torch.ones(()))
        new.scale(torch.ones(()))
    if isinstance(new, DistributedGradScaler):
        with pytest.warns(UserWarning, match="growth_factor"):
            new.load_state_dict(old.state_dict())
    else:
        new.load_state_dict(old.state_dict())
    assert (new.get_scale(), new._get_growth_tracker()) == (4.0, 5)
    assert (new.get_growth_factor(), new.get_backoff_factor(), new.get_growth_interval()) == (3.0, 0.25, 7)
    keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    assert {key: new.state_dict()[key] for key in keys} == {key: old.state_dict()[key] for key in keys}


def test_empty_state_is_refused(make: MakeScaler) -> None:
    disabled = make(enabled=False)
    assert disabled.state_dict() == {}
    with pytest.raises((RuntimeError, ValueError)):
        make().load_state_dict(disabled.state_dict())


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("is_used", [False, True])
def test_pickled_between_steps(make: MakeScaler, enabled: bool, is_used: bool) -> None:
    scaler = make(init_scale=3.0, enabled=enabled)
    param = nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0)

    def step(scaler: GradScaler) -> None:
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)

    if is_used:
        step(scaler)
        scaler.update(5.0)
    twin = pickle.loads(pickle.dumps(scaler))
    assert (twin.is_enabled(), twin.get_scale(), twin.state_dict()) == (
        enabled,
        scaler.get_scale(),
        scaler.state_dict(),
    )
    step(twin)
    if enabled:
        with pytest.raises((AssertionError, RuntimeError), match=r"(pickled|update)"):
            pickle.dumps(twin)  # in the middle of a step


def test_getters_and_setters(make: MakeScaler) -> None:
    scaler = make(init_scale=2.0)
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (5.0, 0.125, 3)
    assert (scaler.is_enabled(), scaler.get_scale()) == (True, 2.0)


def test_disabled_gives_everything_through(make: MakeScaler) -> None:
    scaler = make(enabled=False)
    param = nn.Parameter(torch.zeros(1))
    loss = param.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    optimizer = SGD([param], lr=1.0)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: torch.tensor(7.0)) == 7.0
    scaler.update()
    assert (param.item(), scaler.get_scale(), scaler._get_growth_tracker()) == (-1.0, 1.0, 0)


# ---------------------------------------------------------------- training


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    f"{cls.__name__}, {how}": lambda params, cls=cls, how=how: cls(params, lr=0.25, **{how: True})
    for cls in (SGD, Adam, AdamW)
    for how in ("foreach", "fused")
}


def trained(
    make: MakeScaler | None, make_optimizer: Callable[[Any], Optimizer], run: Callable[..., None], **settings: Any
) -> tuple[list[Tensor], Any]:
    """Parameters after five batches, the third of which overflows; without a scaler the third is left out."""
    model = network()
    optimizer = make_optimizer(model.parameters())
    scaler = None if make is None else make(init_scale=128.0, growth_interval=2, **settings)
    for index, batch in enumerate(batches(5)):
        if scaler is None and index == 2:
            continue
        optimizer.zero_grad()
        run(model, optimizer, batch, scaler, index == 2)
    return list(model.parameters()), scaler


def plain(model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool) -> None:
    loss = model(batch).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
        return
    scaler.scale(loss).backward()
    spoil(model, is_bad)
    scaler.step(optimizer)
    scaler.update()


def autocast(model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch)
        assert output.dtype is torch.bfloat16
        loss = output.float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    spoil(model, is_bad)
    take_step(optimizer, scaler)


def clipping(model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool) -> None:
    """On gradients that were unscaled."""
    (model(batch).square().mean() * (1.0 if scaler is None else scaler.scale(torch.ones(())))).backward()
    spoil(model, is_bad)
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    take_step(optimizer, scaler)


def clipping_by_value(
    model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool
) -> None:
    """Which makes a finite value of an inf; the step is skipped all the same."""
    loss = model(batch).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    spoil(model, is_bad)
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    take_step(optimizer, scaler)


def clipping_scaled(
    model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool
) -> None:
    """On gradients that carry the scale, to a norm that carries it too."""
    loss = model(batch).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1.0 if scaler is None else scaler.get_scale()))
    spoil(model, is_bad)
    take_step(optimizer, scaler)


def penalty(model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool) -> None:
    """On the norm of the gradients, through a second backward pass."""
    loss = model(batch).square().mean()
    params = list(model.parameters())
    scaled = loss if scaler is None else scaler.scale(loss)
    grads = torch.autograd.grad(scaled, params, create_graph=True)
    inv_scale = 1.0 if scaler is None else 1.0 / scaler.get_scale()
    loss = loss + sum((grad * inv_scale).square().sum() for grad in grads).sqrt()  # type: ignore[union-attr]
    (loss if scaler is None else scaler.scale(loss)).backward()
    spoil(model, is_bad)
    take_step(optimizer, scaler)


def accumulation(
    model: nn.Module, optimizer: Optimizer, batch: Tensor, scaler: GradScaler | None, is_bad: bool
) -> None:
    for part in batch.chunk(2):
        loss = model(part).square().mean() / 2
        (loss if scaler is None else scaler.scale(loss)).backward()
    spoil(model, is_bad)
    take_step(optimizer, scaler)


def take_step(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """With the scaler, or without one for comparison."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def spoil(model: nn.Module, is_bad: bool) -> None:
    if is_bad:
        next(model.parameters()).grad.view(-1)[1] = INF  # type: ignore[union-attr]


RUNS = [plain, autocast, clipping, clipping_by_value, clipping_scaled, penalty, accumulation]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_without_a_scaler(make: MakeScaler, name: str, run: Callable[..., None]) -> None:
    params, scaler = trained(make, OPTIMIZERS[name], run)
    expected, _ = trained(None, OPTIMIZERS[name], run)
    # Scales are powers of two: what is left is the rounding of 0.05 * norm and of the penalty, and of bf16 on its way.
    tolerance = {"rtol": 0.0, "atol": 0.0} if run in (plain, accumulation, clipping_by_value) else {}
    torch.testing.assert_close(params, expected, **tolerance)
    # Grown after two steps, halved by the third, grown after the last.
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (256.0, 0)


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("unscales", [(), (0,), (0, 1)])
def test_two_models_and_two_optimizers_differ_only_in_who_skips(bad: int | None, unscales: tuple[int, ...]) -> None:
    # Two losses that mix two models. Each optimizer is stepped by a call of its own, as torch asks for.
    seen = {}
    for scaler_class in BOTH:
        models = [network(), network()]
        optimizers = [SGD(model.parameters(), lr=0.5) for model in models]
        before = [copy.deepcopy(model.state_dict()) for model in models]
        scaler = scaler_class("cpu", init_scale=16.0)
        (batch,) = batches(1)
        first, second = models[0](batch), models[1](batch)
        losses = [(first + 2 * second).square().mean(), (first - second).square().mean()]
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1]).backward()
        if bad is not None:
            spoil(models[bad], True)
        for index in unscales:
            scaler.unscale_(optimizers[index])
        for optimizer in optimizers:
            scaler.step(optimizer)
        found = [flags(scaler, optimizer) for optimizer in optimizers]
        scaler.update()
        moved = [
            any(not torch.equal(old[key], value) for key, value in model.state_dict().items())
            for model, old in zip(models, before, strict=True)
        ]
        seen[scaler_class] = (found, moved, scaler.get_scale(), [list(model.parameters()) for model in models])
    for found, moved, scale, _ in seen.values():
        assert found == [[float(index == bad)] for index in range(2)]
        assert moved == [index != bad for index in range(2)]
        assert scale == (16.0 if bad is None else 8.0)
    torch.testing.assert_close(seen[GradScaler][3], seen[DistributedGradScaler][3], rtol=0, atol=0)


@pytest.mark.parametrize("scaler_class", BOTH)
def test_loss_that_is_not_finite_differs(scaler_class: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale((param * math.nan).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), scaler.get_scale()) == (0.0, 2.0 if scaler_class is GradScaler else 4.0)


@pytest.mark.parametrize("scaler_class", BOTH)
def test_gradient_that_unscaling_makes_infinite_differs(scaler_class: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0)
    scaler = scaler_class("cpu", init_scale=2.0**-20)
    scaler.scale(param.sum()).backward()
    param.grad.fill_(1e36)  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert param.item() == (-INF if scaler_class is GradScaler else 0.0)


@pytest.mark.parametrize("scaler_class", BOTH)
def test_update_between_two_optimizers_differs(scaler_class: MakeScaler) -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [SGD([param], lr=1.0) for param in params]
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    params[0].grad.fill_(INF)  # type: ignore[union-attr]
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert params[1].item() == (-2.0 if scaler_class is GradScaler else -1.0)


@pytest.mark.parametrize("scaler_class", BOTH)
def test_parameter_of_two_optimizers_differs(scaler_class: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizers = [SGD([param], lr=1.0) for _ in range(2)]
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert param.item() == (-1.25 if scaler_class is GradScaler else -2.0)


@pytest.mark.parametrize("scaler_class", BOTH)
def test_gradient_spoiled_after_unscaling_differs(scaler_class: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    param.grad.fill_(INF)  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert param.item() == (-INF if scaler_class is GradScaler else 0.0)


# ---------------------------------------------------------------- misuse


def test_order_of_calls(make: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0)
    scaler = make()
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError):
        scaler.step(optimizer)
    assert param.item() == -1.0


def test_what_step_returns(make: MakeScaler) -> None:
    class Says(SGD):
        def step(self, closure: Any = None) -> float:  # type: ignore[override]
            return 3.0

    param = nn.Parameter(torch.zeros(1))
    optimizer = Says([param], lr=1.0)
    scaler = make()
    returned = []
    for grad in (1.0, INF, math.nan):
        scaler.scale(torch.ones(()))
        param.grad = torch.full((1,), grad)
        returned.append(scaler.step(optimizer))
        scaler.update()
    assert returned == [3.0, None, None]


def test_closure_by_keyword_is_refused(make: MakeScaler) -> None:
    param = nn.Parameter(torch.zeros(1))
    scaler = make()
    scaler.scale(param.sum()).backward()
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        scaler.step(SGD([param], lr=1.0), closure=lambda: 1.0)
    assert param.item() == 0.0


@pytest.mark.parametrize("scaler_class", BOTH)
def test_positional_closure_differs(scaler_class: MakeScaler) -> None:
    # torch runs it, and what it adds to the gradient was never unscaled.
    param = nn.Parameter(torch.zeros(1))
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()

    def closure() -> Tensor:
        loss = scaler.scale(param.sum())
        loss.backward()
        return loss

    if scaler_class is GradScaler:
        scaler.step(SGD([param], lr=1.0), closure)
        assert param.item() == -5.0
    else:
        with pytest.raises(RuntimeError, match="closure"):
            scaler.step(SGD([param], lr=1.0), closure)
        assert param.item() == 0.0


@pytest.mark.parametrize("scaler_class", BOTH)
def test_steps_without_gradients_differ(scaler_class: MakeScaler) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    if scaler_class is GradScaler:
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
