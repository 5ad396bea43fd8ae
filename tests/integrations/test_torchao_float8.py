"""torchao's float8 training under FSDP2: its scales are its own, the decision to skip is one."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from distscale import DistributedGradScaler
from ranks import run_ranks


def float8_model(gathers_float8: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers_float8)
    convert_to_float8_training(model, config=config)
    for layer in model:
        if isinstance(layer, nn.Linear):
            assert type(layer).__name__ == "Float8Linear"
            fully_shard(layer)
    return fully_shard(model)


def local_values(model: nn.Module) -> list[Tensor]:
    values = []
    for param in model.parameters():
        assert isinstance(param, DTensor)
        local = param.to_local()
        # The weight that torchao gathers in float8 is a tensor subclass around its values.
        values.append(getattr(local, "_tensor", local).detach().clone())
    return values


def decisions(rank: int) -> list[tuple[float, list[bool], float]]:
    """Of a model of each kind: the loss scale, which steps were skipped, and the last norm."""
    found = []
    for gathers_float8 in (False, True):
        model = float8_model(gathers_float8)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = DistributedGradScaler("cpu", init_scale=1024.0, names=model, max_norm=1.0)
        generator = torch.Generator().manual_seed(rank)
        skipped, losses = [], []
        for step in range(4):
            before = local_values(model)
            optimizer.zero_grad()
            x = torch.randn(16, 32, generator=generator)
            loss = (model(x) - 1).square().mean()
            scaler.scale(loss).backward()
            if step == 1 and rank == 1:
                # In a part of the gradient that rank 0 does not have.
                grad = model[2].weight.grad
                assert isinstance(grad, DTensor)
                grad.to_local()[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.last_step.skipped)
            is_same = all(map(torch.equal, before, local_values(model)))
            assert is_same == skipped[-1]
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        norm = scaler.last_step.grad_norm
        assert norm is not None and math.isfinite(norm) and norm > 0
        found.append((scaler.get_scale(), skipped, norm))
    everywhere: list[object] = [None, None]
    dist.all_gather_object(everywhere, found)
    assert everywhere[0] == everywhere[1]
    return found


def test_one_decision_for_a_float8_model() -> None:
    for scale, skipped, _ in run_ranks(decisions, 2, timeout_s=100)[0]:
        assert scale == 512.0 and skipped == [False, True, False, False]
