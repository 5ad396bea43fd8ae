"""FSDP2 with the sweep in the backward pass: the same results, and no gradient read twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import counted, error_of, local, poison, results_by_case, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW

from distscale.integrations.fsdp import overlap
from distscale.sweep import choice

WORLD_SIZE = 4
CHANGES: Mapping[str, Callable[[nn.Module], Any]] = {
    "multiplied": lambda model: model[2].weight.grad.mul_(2.0),
    "multiplied locally": lambda model: model[2].weight.grad.to_local().mul_(2.0),
    "replaced": lambda model: setattr(model[2].weight, "grad", model[2].weight.grad * 2.0),
}
KINDS = [
    "fsdp2",
    "hsdp",
    "fp16 reduced in fp16",
    "accumulated",
    "one layer unused",
    "one parameter unused",
    "unscaled and clipped",
    *CHANGES,
]


@contextmanager
def counting_values() -> Iterator[list[int]]:
    """Counts the values that are read, in the native sweep of the CPU."""
    native = choice.backend_for(torch.device("cpu"))
    sweep, read = native.sweep, [0]

    def counting(parts: Any, request: Any) -> Any:
        read[0] += sum(part.values.numel() for part in parts)
        return sweep(parts, request)

    native.sweep = counting
    try:
        yield read
    finally:
        native.sweep = sweep


def sharded(kind: str) -> nn.Module:
    model = tiny_model()
    if kind == "one parameter unused":
        model[3]._parameters = {"unused": nn.Parameter(torch.ones(4)), **model[3]._parameters}  # the first of its unit
    shape, names = ((2, 2), ("replicate", "shard")) if kind == "hsdp" else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    low = torch.float16
    policy = MixedPrecisionPolicy(low, low) if kind == "fp16 reduced in fp16" else MixedPrecisionPolicy()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def backward(model: nn.Module, scaler: Any, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    x = torch.randn(5, 4, generator=generator)
    y = model[0](x) if kind == "one layer unused" else model(x)
    scaler.scale(y.float().square().mean()).backward()


def trained(kind: str, early: bool) -> tuple[list[Any], list[int], StorageWeakRef]:
    """Three steps, an inf on the second one.

    Returns:
        The reports with the parameters behind them, the values read, and the memory that one gradient had.
    """
    model = sharded(kind)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scaler, _ = counted(init_scale=256.0, max_norm=0.05, names=model)
    if early:
        assert overlap(scaler, model) == 3
        assert overlap(scaler, model) == 0
    seen, read = [], []
    for step in range(3):
        with counting_values() as values:
            backward(model, scaler, step, kind)
            if kind == "accumulated":
                backward(model, scaler, step + 10, kind)
            if step == 1 and dist.get_rank() == 2:
                poison(model[0].weight.grad, float("inf"))
            if kind in CHANGES:
                CHANGES[kind](model)
            if kind == "unscaled and clipped":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
        read.append(values[0])
        memory = StorageWeakRef(local(model[0].weight.grad).untyped_storage())
        report = scaler.last_step
        params = [local(param).detach().clone() for param in model.parameters()]
        numbers = {"norm": report.grad_norm, "coef": report.clip_coef or math.nan, **report.amax}
        seen.append((report.skipped, report.scale, numbers, params))
        optimizer.zero_grad()
    return seen, read, memory


def both(rank: int) -> dict[str, Any]:
    results = {}
    for kind in KINDS:
        late, read_late, _ = trained(kind, early=False)
        early, read_early, memory = trained(kind, early=True)
        same = all(
            a[:2] == b[:2]
            and a[2] == pytest.approx(b[2], rel=1e-6, nan_ok=True)
            and all(torch.allclose(p, q, rtol=1e-6, atol=0) for p, q in zip(a[3], b[3], strict=True))
            for a, b in zip(late, early, strict=True)
        )
        results[kind] = same, [seen[0] for seen in early], read_late, read_early, memory.expired()
    return results


def without_units(rank: int) -> tuple[str, str]:
    return error_of(lambda: overlap(counted()[0], tiny_model()))


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    return results_by_case([both, without_units], WORLD_SIZE)


@pytest.mark.parametrize("kind", KINDS)
def test_same_results(results: dict[str, list[Any]], kind: str) -> None:
    for seen in results["both"]:
        same, skipped, *_ = seen[kind]
        assert same
        assert skipped == [False, True, False]


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "one parameter unused"])
def test_no_gradient_is_read_twice(results: dict[str, list[Any]], kind: str) -> None:
    for rank, seen in enumerate(results["both"]):
        _, _, read_late, read_early, _ = seen[kind]
        assert read_early[0] == read_late[0] > 0
        assert read_early[2] == read_late[2]
        # The inf was written after the sweep, so that unit is read again.
        assert (read_early[1] > read_late[1]) == (rank == 2)


def test_the_memory_of_the_gradients_is_let_go(results: dict[str, list[Any]]) -> None:
    for seen in results["both"]:
        *_, is_free = seen["fsdp2"]
        assert is_free


def test_what_changed_is_read_again(results: dict[str, list[Any]]) -> None:
    for seen in results["both"]:
        for kind in ("accumulated", "unscaled and clipped"):
            _, _, read_late, read_early, _ = seen[kind]
            assert all(early > late for early, late in zip(read_early, read_late, strict=True))


def test_a_model_without_units_is_refused(results: dict[str, list[Any]]) -> None:
    for kind, text in results["without_units"]:
        assert kind == "ConfigError"
        assert "Sequential has no FSDP2 unit; call fully_shard() on it before overlap()" in text
