"""What the multi-rank tests share: a tiny model, one step, and looks at the state of a rank that miss no bit.

A test file spawns its ranks once. They run all its cases and return what they saw, and each test asserts on one case,
in the test's own process, where a failed comparison shows both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distscale import DistributedGradScaler, ProcessGroupReducer
from ranks import CountingReducer, run_ranks

__all__ = [
    "BAD_VALUES",
    "OPTIMIZERS",
    "counted",
    "error_of",
    "full_norm",
    "local",
    "on_all",
    "poison",
    "results_by_case",
    "run_step",
    "set_grad",
    "snapshot",
    "tiny_model",
]

BAD_VALUES = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}

OPTIMIZERS: Mapping[str, Callable[[Any], Optimizer]] = {
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw-loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "sgd-momentum-fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}


def results_by_case(cases: Sequence[Callable[[int], Any]], world_size: int) -> dict[str, list[Any]]:
    """Runs every case on every rank, in one start; returns by name of the case what each rank returned."""
    by_rank = run_ranks(_run_cases, world_size, tuple(cases), timeout_s=100.0)
    return {case.__name__: [results[case.__name__] for results in by_rank] for case in cases}


def _run_cases(rank: int, cases: Sequence[Callable[[int], Any]]) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in cases}


def tiny_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three layers, the same on every rank. Over 3 ranks their 7, 2 and 1 rows give uneven and empty shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 1)).to(dtype)


def counted(**arguments: Any) -> tuple[DistributedGradScaler, CountingReducer]:
    """A scaler for the CPU whose exchanges are counted."""
    reducer = CountingReducer(ProcessGroupReducer(arguments.pop("process_group", None)))
    return DistributedGradScaler("cpu", reducer=reducer, **arguments), reducer


def set_grad(param: Tensor, grad: Tensor) -> None:
    """Gives ``param`` a copy of this gradient."""
    param.grad = grad.clone()


def run_step(scaler: DistributedGradScaler, *optimizers: Optimizer) -> Any:
    """A whole step over gradients that are already there and carry the scale; returns its report."""
    scaler.scale(torch.ones(()))
    scaler.step(*optimizers)
    scaler.update()
    return scaler.last_step


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def poison(grad: Tensor | None, value: float) -> None:
    """Sets the last element of this rank's part of a gradient."""
    assert grad is not None
    local(grad).detach().flatten()[-1:].fill_(value)


def full_norm(params: Sequence[Tensor]) -> float:
    """Norm of the whole gradients in float64, by way of ``full_tensor``. Collective."""
    total = 0.0
    for param in params:
        if param.grad is not None:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            total += float(grad.double().square().sum())
    return total**0.5


def snapshot(*optimizers: Optimizer) -> list[bytes]:
    """The bits of all parameters and all optimizer state that this rank holds."""
    tensors: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                tensors.append(param)
                state = optimizer.state.get(param, {})
                tensors += [torch.as_tensor(state[key]) for key in sorted(state) if state[key] is not None]
    return [local(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what ``call`` raises, or two empty strings."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def on_all(by_rank: list[Any]) -> Any:
    """What every rank saw."""
    for seen in by_rank:
        assert seen == by_rank[0]
    return by_rank[0]
