"""The numbers of the method, and the scale's trajectory against torch's own."""

import random

import pytest
import torch
from torch import nn

import distscale


def test_small_gradient_needs_the_scale_in_fp16_and_not_in_bf16() -> None:
    small = torch.tensor(1e-8)
    assert small.half().item() == 0
    stored = (small * 65536).half()
    assert stored.item() == pytest.approx(0.00066, rel=0.01)
    assert (stored.float() / 65536).item() == pytest.approx(9.997e-9, abs=1e-12)
    assert small.bfloat16().item() == pytest.approx(1e-8, rel=0.01)


@pytest.mark.parametrize("value", [6.1e-5, 6e-8])
def test_smallest_normal_and_subnormal_fp16_survive_a_step(value: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = distscale.DistributedGradScaler("cpu", init_scale=1.0)
    scaler.scale((parameter.float() * torch.tensor(value).half().float()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == -torch.tensor(value).half().item() != 0


def test_gradient_that_fp16_loses_is_applied_with_the_scale() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = distscale.DistributedGradScaler("cpu", init_scale=65536.0)
    # The cast to fp16 in between casts the gradient on its way back.
    scaler.scale((parameter.half().float() * 1e-8).sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == pytest.approx(-9.997e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("growth_factor", "backoff_factor", "growth_interval"),
    [(2.0, 0.5, 5), (1.5, 0.7, 3), (2.0, 0.5, 1), (1.001, 0.999, 2)],
)
def test_trace_of_200_overflows_gives_the_trajectory_of_torch(
    growth_factor: float, backoff_factor: float, growth_interval: int
) -> None:
    rng = random.Random(7)
    overflows = [rng.random() < 0.3 for _ in range(200)]
    settings = (2.0**16, growth_factor, backoff_factor, growth_interval)
    ours = _trajectory(distscale.DistributedGradScaler("cpu", *settings), overflows)
    torchs = _trajectory(torch.amp.GradScaler("cpu", *settings), overflows)
    assert ours == torchs
    assert len(set(ours)) > 10


def _trajectory(scaler: torch.amp.GradScaler, overflows: list[bool]) -> list[tuple[float, int]]:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    trajectory = []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        if overflow:
            assert parameter.grad is not None
            parameter.grad[1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        trajectory.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return trajectory
