"""What the random programs have found, each in its smallest form."""

from __future__ import annotations

import math

import pytest
import torch

from distscale import ConfigError, DistributedGradScaler
from ranks import ThreadReducer, run_threads


def _parameter(**kwargs: object) -> tuple[torch.Tensor, torch.optim.SGD]:
    parameter = torch.zeros(1, requires_grad=True)
    return parameter, torch.optim.SGD([parameter], lr=1.0, **kwargs)  # type: ignore[arg-type]


def test_gradient_added_after_the_step_follows_the_scale() -> None:
    # A step and then, before the update, a backward pass that belongs to the next step.
    parameter, optimizer = _parameter()
    scaler = DistributedGradScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.update()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == -3.0


def test_amax_of_optimizers_that_are_unscaled_and_that_are_not() -> None:
    first, first_optimizer = _parameter()
    second, second_optimizer = _parameter()
    scaler = DistributedGradScaler("cpu", init_scale=1024.0, names={"first": first, "second": second})
    scaler.scale((first + 3 * second).sum()).backward()
    scaler.unscale_(first_optimizer)
    scaler.step(first_optimizer, second_optimizer)
    assert scaler.last_step is not None
    assert scaler.last_step.amax == {"first": 1.0, "second": 3.0}


@pytest.mark.parametrize(
    ("arguments", "too_large"), [({"max_scale": 2.0**20}, 2.0**21), ({"policy": "none"}, 2.0), ({}, 2.0**127)]
)
def test_update_stays_within_what_a_checkpoint_may_hold(arguments: dict[str, object], too_large: float) -> None:
    scaler = DistributedGradScaler("cpu", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"update\(new_scale="):
        scaler.update(too_large)
    scaler.update(torch.tensor(too_large))
    assert scaler.get_scale() < too_large
    DistributedGradScaler("cpu", **arguments).load_state_dict(scaler.state_dict())  # type: ignore[arg-type]


def test_fused_optimizer_that_has_stepped_only_another_parameter() -> None:
    first, second = (torch.zeros(64, requires_grad=True) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second]}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5, fused=True)
    scaler = DistributedGradScaler("cpu", init_scale=1024.0)
    for parameter, slope in ((first, 1.0), (second, math.inf)):
        scaler.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        parameter.grad.mul_(slope)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    # Skipped on the device, it would leave a momentum of uninitialized memory.
    assert second not in optimizer.state or optimizer.state[second]["momentum_buffer"] is None


@pytest.mark.parametrize("argument", ["growth_interval", "hysteresis"])
def test_count_beyond_int32(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument}=2147483648 is not allowed"):
        DistributedGradScaler("cpu", **{argument: 2**31})  # type: ignore[arg-type]
    DistributedGradScaler("cpu", **{argument: 2**31 - 1})  # type: ignore[arg-type]


def _idle_at_second_step(reducer: ThreadReducer) -> list[float]:
    """Rank 1 has no loss and no gradient in the step after the scale has changed."""
    parameter, optimizer = _parameter()
    scaler = DistributedGradScaler("cpu", init_scale=4.0, growth_interval=1, reducer=reducer)
    scales = []
    for step in range(3):
        if step != 1 or reducer.rank != 1:
            scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        assert scaler.last_step is not None
        scales.append(scaler.last_step.scale)
        scaler.update()
        optimizer.zero_grad()
    return [*scales, parameter.item()]


def test_rank_without_loss_and_gradients_after_a_change_of_scale() -> None:
    # C6: it cannot know by what its peers have scaled theirs, and need not.
    assert run_threads(_idle_at_second_step, 2) == [[4.0, 8.0, 16.0, -3.0], [4.0, 8.0, 16.0, -2.0]]


def _grow_while_one_is_idle(reducer: ThreadReducer) -> bool:
    (first, first_optimizer), (second, second_optimizer) = _parameter(), _parameter()
    added = torch.zeros(1, requires_grad=True)
    scaler = DistributedGradScaler("cpu", reducer=reducer)
    scaler.scale(first.sum()).backward()
    scaler.step(first_optimizer)
    scaler.update()
    first_optimizer.zero_grad()
    first_optimizer.add_param_group({"params": [added]})
    if reducer.rank != 1:
        scaler.scale(second.sum()).backward()  # meets the new parameter, as rank 1 does not
    scaler.step(second_optimizer)
    scaler.update()
    scaler.step(first_optimizer)
    return scaler.last_step is not None and not scaler.last_step.skipped


def test_ranks_that_meet_a_new_parameter_at_different_times() -> None:
    assert run_threads(_grow_while_one_is_idle, 2) == [True, True]


def _two_stages(reducer: ThreadReducer) -> list[float]:
    """Rank 1 has the loss; rank 0's gradients come from it. The second optimizer steps at every other update."""
    (first, first_optimizer), (second, second_optimizer) = _parameter(), _parameter()
    names = {"first": first, "second": second}
    scaler = DistributedGradScaler("cpu", init_scale=4.0, growth_interval=1, reducer=reducer, names=names)
    if reducer.rank == 1:
        scaler.scale(torch.zeros(()))
    scaler.step(first_optimizer, second_optimizer)  # from here on it knows both
    scaler.update()
    for step in range(4):
        loss = (first + second).sum()
        (scaler.scale(loss) if reducer.rank == 1 else loss * scaler.get_scale()).backward()
        optimizers = (first_optimizer, second_optimizer) if step % 2 else (first_optimizer,)
        scaler.step(*optimizers)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [first.item(), second.item()]


def test_waiting_gradients_of_a_rank_that_scales_no_loss() -> None:
    assert run_threads(_two_stages, 2) == [[-4.0, -4.0]] * 2
