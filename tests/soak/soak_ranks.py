"""A rank's side: plays the steps of an episode, puts its faults in, and notes what it sees. Judges nothing."""

from __future__ import annotations

import gc
import os
import traceback
import zlib
from collections.abc import Hashable
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases import OPTIMIZERS, local, poison, snapshot
from soak_episodes import Episode, Fault
from soak_pieces import Layout
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from distscale import DistributedGradScaler, StepReport
from distscale.integrations.fsdp import overlap

HUGE = 3e38
"""Infinite in fp32 once it is divided by a scale below 0.88."""


class Row(NamedTuple):
    """What one rank saw of one step. Everything after ``error`` is as it was after ``update``."""

    error: str = ""
    has_put: bool = False
    """Whether it has put in a fault for which the step must be skipped."""
    sees_bad: bool = False
    """Whether plain torch finds a value in its gradients that is not finite, before or after unscaling."""
    loses: bool = False
    """Whether its loss was not finite."""
    vetoes: bool = False
    pieces: tuple[tuple[Hashable, float, float], ...] = ()
    """The pieces of gradients that it holds, as they are before ``step``, unscaled: key, largest magnitude, and sum of
    squares in float64."""
    moved: tuple[bool, ...] = ()
    """Of each optimizer that has gradients here, whether a parameter was changed."""
    params_changed: bool = False
    params_bad: bool = False
    """Not finite any more."""
    state_changed: bool = False
    """Any bit of the optimizer's state."""
    scale: float = 0.0
    trackers: tuple[int, ...] = ()
    replicas: tuple[tuple[Hashable, int], ...] = ()
    """A checksum of each parameter it holds, by what is equal for replicas."""
    report: StepReport | None = None
    amax: tuple[tuple[str, float], ...] = ()


def serve(rank: int, address: str, num_ranks: int, scaler_kind: str, group_timeout_s: float) -> None:
    """Plays every episode that comes from the parent, until the connection ends."""
    connection = Client(address)
    connection.send((rank, os.getpid()))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{address}.store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=group_timeout_s),
    )
    gc.freeze()  # torch itself is a million objects, which every collection would look at
    while True:
        try:
            text = connection.recv()
            connection.send(play(Episode.from_json(text), scaler_kind))
        except (EOFError, OSError):  # the parent has given this world up
            os._exit(0)  # what the peers left behind in the process group could hang its end
        gc.collect()  # process groups and hooks of the layout are in cycles


def play(episode: Episode, scaler_kind: str) -> list[Row]:
    """One row a step, up to the first error."""
    rows: list[Row] = []
    try:
        player = Player(episode, scaler_kind)
        for step, faults in enumerate(episode.steps):
            rows.append(player.step(step, faults))
    except Exception:
        rows.append(Row(error=traceback.format_exc()))
    return rows


class Player:
    """Holds the training of one episode on this rank."""

    def __init__(self, episode: Episode, scaler_kind: str) -> None:
        self.rank = dist.get_rank()
        self.episode = episode
        self.layout: Layout = episode.kind.build(episode.seed)
        params = self.layout.params
        self.num_optimizers = min(episode.num_optimizers, len(params))  # a flat model has one parameter
        self.optimizers: list[Optimizer] = [
            OPTIMIZERS[episode.optimizer](params[first :: self.num_optimizers]) for first in range(self.num_optimizers)
        ]
        self.is_distscale = scaler_kind == "distscale"
        arguments: Any = {"init_scale": episode.init_scale, "growth_interval": episode.growth_interval}
        self.scaler: Any
        if self.is_distscale:
            self.scaler = DistributedGradScaler("cpu", max_norm=episode.max_norm, **arguments)
        elif self.layout.is_fsdp1:
            self.scaler = ShardedGradScaler("cpu", process_group=dist.group.WORLD, **arguments)
        else:
            self.scaler = torch.amp.GradScaler("cpu", **arguments)
        if episode.overlaps and self.layout.fsdp2 is not None:
            overlap(self.scaler, self.layout.fsdp2)
        self.held: list[list[Hashable]] = []  # by rank, the pieces of gradients that it holds

    def step(self, step: int, faults: tuple[Fault, ...]) -> Row:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loses = self._backward(step, faults)
        if not self.held:
            self.held = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(self.held, list(self._pieces()))
        vetoes, has_put = self._put(faults)
        sees_bad = self._sees_bad()
        before = [local(param).detach().clone() for param in self.layout.params], snapshot(*self.optimizers)
        pieces = self._measured()
        held = {key for key, _, _ in pieces}
        are_held = [key in held for key in self._all_pieces()]
        self._step(vetoes)
        # An == of tensors would take a NaN for a change, and -0.0 for 0.0; these are bits.
        changed = [
            not torch.equal(old.view(torch.int32), local(param).detach().view(torch.int32))
            for old, param in zip(before[0], self.layout.params, strict=True)
        ]
        num = self.num_optimizers
        moved = tuple(any(changed[first::num]) for first in range(num) if any(are_held[first::num]))
        report = self.scaler.last_step if self.is_distscale else None
        return Row(
            "",
            has_put or loses or vetoes,
            sees_bad,
            loses,
            vetoes,
            pieces,
            moved,
            any(changed),
            not all(bool(local(param).isfinite().all()) for param in self.layout.params),
            snapshot(*self.optimizers) != before[1],
            self.scaler.get_scale(),
            self._trackers(),
            tuple((key, _checksum(self.layout.params[key[0]])) for key in self._all_pieces()),
            report,
            tuple(report.amax.items()) if report else (),
        )

    def _backward(self, step: int, faults: tuple[Fault, ...]) -> bool:
        """Returns whether this rank's loss is not finite."""
        ranks = self.layout.loss_ranks
        mine = [
            fault
            for fault in faults
            if fault.kind in ("loss", "backward") and ranks[fault.rank % len(ranks)] == self.rank
        ]
        lost = [float(fault.value) for fault in mine if fault.kind == "loss"]
        bad = [float(fault.value) for fault in mine if fault.kind == "backward"]

        def scale(loss: Tensor) -> Tensor:
            for value in lost:
                loss = loss * value
            for value in bad:
                loss.register_hook(lambda grad, value=value: grad * value)
            scaled: Tensor = self.scaler.scale(loss / self.episode.num_backwards)
            return scaled

        seed = self.episode.seed + 1000 * step
        for _ in range(self.episode.num_backwards - 1):
            with self.layout.defer():
                self.layout.backward(lambda loss: self.scaler.scale(loss / self.episode.num_backwards), seed)
            seed += 1
        self.layout.backward(scale, seed)
        self.has_spread = bool(bad)
        return bool(lost)

    def _pieces(self) -> dict[Any, Tensor]:
        """This rank's parts of gradients, without empty ones, by what is equal on all ranks that hold the piece."""
        grads = {self.layout.key(index): param.grad for index, param in enumerate(self.layout.params)}
        return {key: grad for key, grad in grads.items() if grad is not None and local(grad).numel()}

    def _all_pieces(self) -> list[Any]:
        return [self.layout.key(index) for index in range(len(self.layout.params))]

    def _measured(self) -> tuple[tuple[Hashable, float, float], ...]:
        wide = {key: local(grad).double() / self.scaler.get_scale() for key, grad in self._pieces().items()}
        return tuple((key, float(grad.abs().max()), float(grad.square().sum())) for key, grad in wide.items())

    def _put(self, faults: tuple[Fault, ...]) -> tuple[bool, bool]:
        """Returns whether this rank vetoes, and whether it has put in a bad value."""
        has_put, vetoes = self.has_spread, False
        for fault in faults:
            if fault.kind in ("idle", "missing") and fault.rank == self.rank:
                for param in self.layout.idle if fault.kind == "idle" else self.layout.missing:
                    param.grad = None
        if self.layout.idle and not self._pieces():
            has_put = False  # what this rank's loss has spread is gone, and was on no other
        for fault in faults:
            vetoes |= fault.kind == "veto" and fault.rank == self.rank
            if fault.kind in ("gradient", "replica", "huge"):
                has_put |= self._poison(fault)
        return vetoes, has_put

    def _poison(self, fault: Fault) -> bool:
        value = HUGE if fault.kind == "huge" else float(fault.value)
        if fault.kind == "huge" and self.scaler.get_scale() >= 0.88:
            return False
        ranks = range(dist.get_world_size())
        rank = next(rank for rank in (*ranks[fault.rank :], *ranks) if self.held[rank])
        key = self.held[rank][fault.tensor % len(self.held[rank])]
        piece = self._pieces().get(key)
        if piece is None or (fault.kind == "replica" and rank != self.rank):
            return False
        poison(piece, value)
        return True

    def _sees_bad(self) -> bool:
        inv_scale = torch.tensor(1.0 / self.scaler.get_scale())
        return not all(
            bool(local(grad).isfinite().all()) and bool((local(grad) * inv_scale).isfinite().all())
            for grad in self._pieces().values()
        )

    def _step(self, vetoes: bool) -> None:
        """The calls that a training script makes."""
        if vetoes:
            self.scaler.veto("drawn")
        if not self.is_distscale and self.scaler._scale is None:
            self.scaler.scale(torch.zeros(()))  # torch's wants it, also on a stage of a pipeline without a loss
        max_norm = self.episode.max_norm
        clip = None if self.is_distscale or max_norm is None else self.layout.clip
        if self.episode.unscales or clip is not None:
            self.scaler.unscale_(self.optimizers[0])
        if clip is not None and max_norm is not None:
            clip(max_norm)
        self.scaler.step(*self.optimizers)
        self.scaler.update()

    def _trackers(self) -> tuple[int, ...]:
        names = ["_growth_tracker"]
        if self.is_distscale:
            names += ["_hysteresis_tracker", "_blocked_steps", "_step"]
        return tuple(int(getattr(self.scaler, name)) for name in names)


def _checksum(param: Tensor) -> int:
    return zlib.crc32(local(param).detach().contiguous().numpy().tobytes())
