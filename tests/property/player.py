"""One rank that plays a program on a real scaler, with real optimizers and backward passes, and says what it sees."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from calls import (
    AddGroup,
    Backward,
    Op,
    Restart,
    SetGrowthInterval,
    Step,
    Stop,
    TensorSpec,
    Unscale,
    Update,
    Veto,
    World,
)
from expectations import Expected, Report, Trackers
from oracle import Oracle
from torch import Tensor

from distscale import DistributedGradScaler, DistScaleError, Reducer, StepReport
from ranks import CountingReducer

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class _Slope(torch.autograd.Function):
    """A loss of value 0 whose gradient is given: a gradient can be non-finite under a finite loss."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, slope: Tensor) -> Tensor:
        ctx.dtype = param.dtype
        ctx.save_for_backward(slope)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return (slope * outer[0]).to(ctx.dtype), None


@dataclass
class Seen:
    """What one rank saw of a call, comparable with what the oracle expects."""

    error: str | None
    reports: list[Report]
    last_step: Report | None
    num_exchanges: int
    saved: dict[str, Any]
    tensors: dict[str, tuple[bytes, bytes | None, bytes | None]]
    """By name: bytes of the parameter, its gradient, its momentum."""


class Player:
    """One rank of a world."""

    def __init__(self, world: World, reducer: Reducer) -> None:
        self.world = world
        self.rank = reducer.rank
        self.reducer = CountingReducer(reducer)
        self.params: dict[str, Tensor] = {}
        self.reports: list[StepReport] = []
        groups: list[list[dict[str, list[Tensor]]]] = [[] for _ in world.optimizers]
        for spec in world.tensors:
            groups[spec.optimizer] += self._new_group(spec)
        self.optimizers = [
            torch.optim.SGD(group, lr=spec.lr, momentum=spec.momentum, fused=spec.fused)
            for spec, group in zip(world.optimizers, groups, strict=True)
        ]
        self.scaler = self._new_scaler()

    def play(self, op: Op) -> Seen:
        """Makes the call; errors of the scaler are part of what is seen."""
        num_before = self.reducer.num_reduces
        self.reports.clear()
        error = None
        last: StepReport | None = None
        try:
            last = self._call(op)
        except DistScaleError as raised:
            error = type(raised).__name__
        return Seen(
            error,
            [as_report(report) for report in self.reports],
            as_report(last) if last else None,
            self.reducer.num_reduces - num_before,
            self.scaler.state_dict(),
            {name: self._bits(param) for name, param in self.params.items()},
        )

    def _call(self, op: Op) -> StepReport | None:
        scaler = self.scaler
        match op:
            case Backward():
                self._backward(op)
            case Unscale(optimizer):
                scaler.unscale_(self.optimizers[optimizer])
            case Step(optimizers, reads, set_to_none):
                chosen = [self.optimizers[index] for index in optimizers]
                scaler.step(*chosen)
                last = scaler.last_step if reads else None
                for optimizer in chosen:
                    optimizer.zero_grad(set_to_none)
                return last
            case Update(new_scale, as_tensor):
                self._update(new_scale, as_tensor)
            case Veto(rank):
                if rank == self.rank:
                    scaler.veto("a reason")
            case Stop(rank):
                if rank == self.rank:
                    scaler.request_stop()
            case SetGrowthInterval(interval):
                scaler.set_growth_interval(interval)
            case Restart(torch_format):
                self._restart(torch_format)
            case AddGroup(spec):
                for group in self._new_group(spec):
                    self.optimizers[spec.optimizer].add_param_group(group)
        return None

    def _backward(self, op: Backward) -> None:
        if self.rank in op.idle:
            return
        dtype = TORCH_DTYPES[op.loss_dtype]
        loss = torch.tensor(op.loss[self.rank])
        for name, param in self.params.items():
            slope = op.grads.get((self.rank, name))
            if slope is not None:
                loss = loss + _Slope.apply(param, torch.tensor(slope, dtype=torch.float32))
        if self.rank in self.world.silent:
            # What a backward pass through the later stages brings, whose last one has scaled the loss.
            scaled = loss.to(dtype).float() * self.scaler.get_scale()
        else:
            scaled = self.scaler.scale(loss.to(dtype))
        if scaled.requires_grad:
            scaled.backward()

    def _update(self, new_scale: float | None, as_tensor: bool) -> None:
        unscaled = [
            optimizer
            for optimizer in self.optimizers
            if self.scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED"
        ]
        num_updates = self.scaler.state_dict()["step"]
        try:
            self.scaler.update(torch.tensor(new_scale) if as_tensor and new_scale is not None else new_scale)
        finally:
            if self.scaler.state_dict()["step"] != num_updates:
                for optimizer in unscaled:  # never stepped: nothing may be added to what carries no scale
                    optimizer.zero_grad()

    def _restart(self, torch_format: bool) -> None:
        saved = self.scaler.state_dict()
        if torch_format:
            saved = {key: saved[key] for key in TORCH_KEYS}
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.scaler = self._new_scaler()
        self.scaler.load_state_dict(torch.load(file, weights_only=True))

    def _new_scaler(self) -> DistributedGradScaler:
        return DistributedGradScaler(
            "cpu",
            reducer=self.reducer,
            names=self.params,
            on_step=self.reports.append,
            **self.world.scaler_arguments(),
        )

    def _new_group(self, spec: TensorSpec) -> list[dict[str, list[Tensor]]]:
        """A group of its own for each tensor: SGD's fused kernel wants all momenta of a group, or none."""
        numel = spec.numels[self.rank]
        if numel is None:
            return []
        param = torch.zeros(numel, dtype=TORCH_DTYPES[spec.dtype], requires_grad=True)
        self.params[spec.name] = param
        return [{"params": [param]}]

    def _bits(self, param: Tensor) -> tuple[bytes, bytes | None, bytes | None]:
        states = [optimizer.state[param] for optimizer in self.optimizers if param in optimizer.state]
        momentum = states[0].get("momentum_buffer") if states else None
        return _bytes(param.detach()), _bytes(param.grad), _bytes(momentum)


def as_report(report: StepReport) -> Report:
    """In the oracle's words."""
    culprit = report.culprit
    return Report(
        step=report.step,
        skipped=report.skipped,
        scale=report.scale,
        next_scale=report.next_scale,
        grad_norm=report.grad_norm,
        clip_coef=report.clip_coef,
        culprit=(culprit.rank, culprit.tensor, culprit.kind) if culprit else None,
        amax=tuple(report.amax.items()),
        vetoed_by=report.vetoed_by,
        stop_requested=report.stop_requested,
    )


def check_all(oracle: Oracle, expected: Expected, seen: Sequence[Seen]) -> None:
    """Raises AssertionError, naming the rank and what differs, unless each rank saw what the oracle says."""
    for rank, what in enumerate(seen):
        _check(rank, oracle, expected, what)
        _same(rank, "reports, against rank 0's,", what.reports, seen[0].reports)
        _same(rank, "last_step, against rank 0's,", what.last_step, seen[0].last_step)


def _check(rank: int, oracle: Oracle, expected: Expected, seen: Seen) -> None:
    _same(rank, "error", seen.error, expected.error)
    _same(rank, "exchanges", seen.num_exchanges, expected.num_exchanges)
    _same(rank, "number of reports", len(seen.reports), len(expected.reports))
    for report, wanted in zip(seen.reports, expected.reports, strict=True):
        _same(rank, "report", _with_norm_of(wanted, report), wanted)
    _same(rank, "last_step", _with_norm_of(expected.last_step, seen.last_step), expected.last_step)
    saved = seen.saved
    trackers = Trackers(saved["scale"], saved["_growth_tracker"], saved["hysteresis_tracker"], saved["blocked_steps"])
    _same(rank, "trackers", trackers, oracle.trackers)
    _same(rank, "step", saved["step"], oracle.num_updates)
    places = [place for place in oracle.params if place[0] == rank]
    _same(rank, "tensors", sorted(seen.tensors), sorted(name for _, name in places))
    for place in places:
        wanted = (oracle.params[place], oracle.grads[place], oracle.momenta[place])
        for what, mine, array in zip(
            ("parameter", "gradient", "momentum"), seen.tensors[place[1]], wanted, strict=True
        ):
            if mine != _normal_bytes(array):
                got = None if mine is None else np.frombuffer(mine, oracle.params[place].dtype)
                raise AssertionError(f"rank {rank}: {what} of {place[1]} is {got}, the oracle says {array}")


def _with_norm_of(wanted: Report | None, report: Report | None) -> Report | None:
    """``report`` with the norm and the coefficient of ``wanted``, if they are equal but for their last bits.

    torch's square root of 0.5 is not correctly rounded on every processor.
    """
    if wanted is None or report is None:
        return report
    close = {
        key: getattr(wanted, key)
        for key in ("grad_norm", "clip_coef")
        if None not in (getattr(wanted, key), getattr(report, key))
        and math.isclose(getattr(wanted, key), getattr(report, key), rel_tol=1e-15)
    }
    return replace(report, **close)


def _same(rank: int, what: str, seen: object, wanted: object) -> None:
    # repr makes NaN equal to itself; it tells apart all other floats.
    assert repr(seen) == repr(wanted), f"rank {rank}: {what}\n  is {seen}\n  the oracle says {wanted}"


def _bytes(tensor: Tensor | None) -> bytes | None:
    """Bit for bit, but for the payload and sign of a NaN."""
    if tensor is None:
        return None
    values = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return values.view(torch.uint8).numpy().tobytes() if values.numel() else b""


def _normal_bytes(array: np.ndarray | None) -> bytes | None:
    if array is None:
        return None
    return np.where(np.isnan(array), np.full_like(array, math.nan), array).tobytes()
