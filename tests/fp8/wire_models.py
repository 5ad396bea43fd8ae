"""A model whose gradients are sent, what its reduced gradients are exactly, and how far from that others are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distscale.fp8 import DelayedScaling, Fp8Scales

__all__ = ["Blocks", "agree", "batch", "errors", "exact", "new_scales", "step"]

WIDTH = 32
VOCABULARY = 48


class Blocks(nn.Module):
    """An embedding, two blocks of which each has a branch that may stay unused, and a head of an uneven size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 49)

    def forward(self, tokens: Tensor, uses_side: bool = True) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, uses_side)
        return self.head(x).square().mean() + self.head(x).sum() / 100


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, uses_side: bool) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y + torch.tanh(self.side(x)) if uses_side else y


def batch(rank: int, index: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randint(VOCABULARY, (16,), generator=generator)


def exact(model: nn.Module, losses: Callable[[nn.Module], Sequence[Tensor]], factor: float) -> dict[str, Tensor]:
    """The sum over the ranks of the gradients of all ``losses``, in fp32, times ``factor``; of a copy of ``model``."""
    model = copy.deepcopy(model)
    for loss in losses(model):
        loss.backward()
    sums = {}
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(grad)
        sums[name] = grad * factor
    return sums


def errors(model: nn.Module, expected: dict[str, Tensor], unused: Sequence[str] = ()) -> dict[str, float]:
    """Of the reduced gradients, relative to their norm, by name."""
    found = {}
    for name, param in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")
        if any(part in name for part in unused):
            assert param.grad is None and not expected[name].any(), name
            continue
        grad = param.grad
        assert grad is not None, name
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name] = ((grad - expected[name]).norm() / expected[name].norm()).item()
    return found


def new_scales(fp8_format: str = "E4M3", margin: int = 0) -> Fp8Scales:
    return Fp8Scales(DelayedScaling(fp8_format, margin=margin))  # type: ignore[arg-type]


def agree(scales: Fp8Scales) -> None:
    """What the scaler does before its first step."""
    by_rank = [scales.tensors] * dist.get_world_size()
    dist.all_gather_object(by_rank, scales.tensors)
    scales.agree(by_rank, torch.device("cpu"))


def step(scales: Fp8Scales) -> tuple[Tensor, Tensor]:
    """What the scaler does at every step; returns amax bits and numbers of saturated values, reduced."""
    bits, num_saturated = scales.collect(torch.device("cpu"))
    scales.clear()
    dist.all_reduce(bits, dist.ReduceOp.MAX)
    dist.all_reduce(num_saturated)
    one = torch.ones(())
    scales.commit(bits, torch.zeros(()), one)
    scales.hand_out(one)
    return bits, num_saturated
