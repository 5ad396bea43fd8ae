"""What four ranks with one scaler have to do, in plain Python: no torch, no ranks, no devices.

One object knows the truth about all ranks. Where the scaler exchanges vectors, it just looks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from calls import (
    NUM_RANKS,
    AddGroup,
    Backward,
    Op,
    Restart,
    SetGrowthInterval,
    Step,
    Stop,
    Unscale,
    Update,
    Veto,
    World,
)
from expectations import Decided, Expected, Refused, Report, Stage, Trackers, next_trackers
from holdings import NUMPY_DTYPES, Holdings, Place, look


class Seen(NamedTuple):
    """Of a tensor on one rank, when replicas are told from others."""

    values: np.ndarray
    grad: np.ndarray | None
    """Unscaled; None if it is not there, zero, or not finite."""

    @property
    def lacks_gradient(self) -> bool:
        return self.grad is None and self.values.size > 0

    def distances(self, other: Seen) -> list[float]:
        """Of values and, if known, gradients, relative to the larger norm; infinite for another size."""
        if len(self.values) != len(other.values):
            return [math.inf]
        pairs = [(self.values, other.values)]
        if self.grad is not None and other.grad is not None:
            pairs.append((self.grad, other.grad))
        norms = [max(float(np.linalg.norm(one)), float(np.linalg.norm(two))) for one, two in pairs]
        return [float(np.linalg.norm(one - two)) / (norm or 1.0) for (one, two), norm in zip(pairs, norms, strict=True)]

    def is_like(self, other: Seen) -> bool:
        return max(self.distances(other)) < 0.05


class Oracle(Holdings):
    """Plays a program's calls, one by one; its attributes are the state after the last one."""

    def __init__(self, world: World) -> None:
        self.world = world
        super().__init__()
        for spec in world.tensors:
            self.create(spec)
        self.growth_interval = world.growth_interval
        start = {"static": world.init_scale, "none": 1.0}.get(world.policy, world.init_scale)
        self.trackers = Trackers(start, 0, self._full_hysteresis, 0)
        self.num_updates = 0
        self._build_scaler()

    @property
    def _full_hysteresis(self) -> int:
        return self.world.hysteresis if self.world.policy == "dynamic" else 1

    def _build_scaler(self) -> None:
        """Forgets what no state dict holds."""
        self.met: list[int] = []
        self.has_scaled = False
        self.stop = False
        self._carried: list[float | None] = [None] * NUM_RANKS
        self._table: list[str] | None = None
        self._kept: dict[Place, Seen] = {}
        self._looks_again, self._num_looks = False, 0
        self._holders: dict[Place, int] = {}
        self._listed: dict[int, list[str]] = {}
        self._waiting: deque[Decided] = deque()
        self._fresh: set[int] = set()  # optimizers that hold gradients of the carried scale
        self.veto: set[int] = set()
        self._sent_vetoes: set[int] = set()
        self._begin_step()

    def _begin_step(self) -> None:
        self.stages = [Stage.READY] * len(self.world.optimizers)
        self.veto -= self._sent_vetoes
        self._sent_vetoes = set()
        self.decisions: list[Decided] = []
        self._lost: dict[int, str] = {}
        self._is_idle = [True] * NUM_RANKS  # has scaled no loss since the last update

    # ---------------------------------------------------------------- calls

    def play(self, op: Op) -> Expected:
        """Makes the call and says what must be seen."""
        self._reports: list[Report] = []
        self._num_exchanges = 0
        error = None
        try:
            with np.errstate(all="ignore"):
                self._call(op)
        except Refused as refused:
            error = str(refused)
        last = None
        if isinstance(op, Step) and op.reads and error is None:
            last = self.decisions[-1].report
        return Expected(error, self._reports, last, self._num_exchanges)

    def _call(self, op: Op) -> None:
        match op:
            case Backward():
                self._backward(op)
            case Unscale(optimizer):
                self._unscale(optimizer)
            case Step():
                self._step(op)
            case Update():
                self._update(op)
            case Veto(rank):
                self.veto.add(rank)
                self._sent_vetoes.discard(rank)  # this one is for the next decision
            case Stop():
                self.stop = True
            case SetGrowthInterval(interval):
                self.growth_interval = interval
            case Restart(torch_format):
                self._restart(torch_format)
            case AddGroup(spec):
                self.create(spec)

    def _backward(self, op: Backward) -> None:
        for rank, loss in enumerate(op.loss):
            if rank in op.idle or rank in self.world.silent:
                continue
            if self._is_idle[rank]:
                for optimizer in self._fresh:
                    self.multiply(rank, optimizer, np.float32(self.trackers.scale / self._scale_on(rank)))
                self._carried[rank] = self.trackers.scale
                self._is_idle[rank] = False
            self.has_scaled = True
            if not math.isfinite(loss) and self._lost.get(rank) != "nan":
                self._lost[rank] = "nan" if math.isnan(loss) else "inf"
        # The scale reaches the gradients through the loss's own dtype.
        carried = np.float32(NUMPY_DTYPES[op.loss_dtype].type(self.trackers.scale))
        for (rank, name), values in op.grads.items():
            self.add((rank, name), values, carried)
            self._fresh.add(self.spec(name).optimizer)

    def _unscale(self, optimizer: int) -> None:
        if self.stages[optimizer] is not Stage.READY:
            raise Refused("ProtocolError")
        self._meet([optimizer])
        for rank in range(NUM_RANKS):
            self.multiply(rank, optimizer, np.float32(1 / self._scale_on(rank)))
        self.stages[optimizer] = Stage.UNSCALED

    def _step(self, op: Step) -> None:
        if any(self.stages[index] is Stage.STEPPED for index in op.optimizers):
            raise Refused("ProtocolError")
        decided = self._decide(op.optimizers)
        if not decided.report.skipped:
            for index in op.optimizers:
                carried = 1.0 if self.stages[index] is Stage.UNSCALED else decided.report.scale
                self.apply(index, self.world.optimizers[index], carried, decided.report.clip_coef or 1.0)
        for index in op.optimizers:
            self.stages[index] = Stage.STEPPED
            self._forget(index, op.set_to_none)

    def _update(self, op: Update) -> None:
        new_scale = op.new_scale
        unstepped = [index for index in self.met if self.stages[index] is Stage.UNSCALED]
        if unstepped and new_scale is None:
            self._decide(unstepped)
        if new_scale is None and not self.decisions:
            raise Refused("ProtocolError")
        if new_scale is not None:
            low, high = self._bounds()
            if not low <= new_scale <= high:
                if not op.as_tensor:
                    raise Refused("ConfigError")
                new_scale = min(max(new_scale, low), high)  # its value is not known on the host
        old_scale = self.trackers.scale
        if self.decisions:
            self.trackers = self.decisions[-1].trackers
        if new_scale is not None:
            self.trackers = replace(self.trackers, scale=new_scale)
        for rank in self.world.silent:
            for optimizer in self._fresh - set(unstepped):
                self.multiply(rank, optimizer, np.float32(self.trackers.scale / old_scale))
        for decided in self.decisions:
            decided.report = replace(decided.report, next_scale=self.trackers.scale)
            decided.trackers = self.trackers
            self._waiting.append(decided)
        self.num_updates += 1
        for index in unstepped:  # what a user must do: they carry no scale any more
            self._forget(index, True)
        self._begin_step()
        self._deliver()

    def _bounds(self) -> tuple[float, float]:
        world = self.world
        return {"none": (1.0, 1.0), "static": (2.0**-126, 2.0**126)}.get(
            world.policy, (world.min_scale, world.max_scale)
        )

    def _deliver(self) -> None:
        while self._waiting:
            decided = self._waiting.popleft()
            self._reports.append(decided.report)
            limit = self.world.max_consecutive_skips
            if limit is not None and decided.trackers.blocked >= limit and decided.report.culprit:
                raise Refused("ScaleExhaustedError")

    def _restart(self, torch_format: bool) -> None:
        if torch_format:
            self.trackers = replace(self.trackers, hysteresis=self._full_hysteresis, blocked=0)
            self.num_updates = 0
        for place in self.grads:
            self.grads[place] = None
        self._build_scaler()

    # ---------------------------------------------------------------- the decision

    def _decide(self, optimizers: Sequence[int]) -> Decided:
        """Looks at the gradients of all ranks at once."""
        is_refused = not self.has_scaled and self.world.policy != "none"
        self._agree(optimizers, is_refused)
        self._num_exchanges += 1
        if is_refused:
            raise Refused("ProtocolError")
        assert self._table is not None
        scale = self._scale_of_gradients(optimizers)
        amax = dict.fromkeys(self._table, 0.0)
        found: dict[str, list[tuple[str, int]]] = {}
        square = 0.0
        for (rank, name), grad in self.grads.items():
            if grad is None or self.spec(name).optimizer not in optimizers:
                continue
            inv_scale = 1.0 if self.stages[self.spec(name).optimizer] is Stage.UNSCALED else 1 / scale
            kind, highest = look(grad, inv_scale)
            amax[name] = max(amax[name], highest) if not math.isnan(amax[name]) else math.nan
            if kind:
                found.setdefault(name, []).append((kind, rank))
                amax[name] = math.nan if kind == "nan" else amax[name]
            square += (
                float(np.sum(np.square(grad.astype(np.float64)))) / self._holders[rank, name] * inv_scale * inv_scale
            )

        lost, overflow = bool(self._lost), bool(found)
        skipped = lost or overflow or bool(self.veto)
        self._sent_vetoes = set(self.veto)
        culprit = None
        if lost:
            kind, rank = max((kind, rank) for rank, kind in self._lost.items())
            culprit = rank, "loss", kind
        elif overflow:
            name = max(found, key=self._table.index)
            kind, rank = max(found[name])  # "nan" sorts above "inf", as its bits do
            culprit = rank, name, kind
        decided = Decided(Report(
            step=self.num_updates,
            skipped=skipped,
            scale=scale,
            next_scale=math.nan,
            grad_norm=None if self.world.max_norm is None else math.sqrt(square) if square >= 0 else math.nan,
            clip_coef=None,
            culprit=culprit,
            amax=tuple(amax.items()),
            vetoed_by=max(self.veto, default=None),
            stop_requested=self.stop,
        ), self.trackers, overflow and not lost, lost, not skipped)  # fmt: skip
        if decided.report.grad_norm is not None and not skipped:
            coef = min(1.0, self.world.max_norm / (decided.report.grad_norm + 1e-6))
            decided.report = replace(decided.report, clip_coef=coef)
        if self.decisions:
            before = self.decisions[-1]
            decided.overflow |= before.overflow
            decided.lost |= before.lost
            decided.clean &= before.clean
        decided.trackers = next_trackers(self.world, self.growth_interval, self.trackers, decided)
        decided.report = replace(decided.report, next_scale=decided.trackers.scale)
        self.decisions.append(decided)
        return decided

    def _scale_on(self, rank: int) -> float:
        carried = self._carried[rank]
        return self.trackers.scale if carried is None else carried

    def _scale_of_gradients(self, optimizers: Sequence[int]) -> float:
        """That of all ranks which have gradients or have scaled a loss; the others do not know it."""
        scales = self._scales(optimizers)
        assert len(scales) < 2, "this program has no right answer"
        return scales.pop() if scales else self.trackers.scale

    def has_right_answer(self, optimizers: Sequence[int]) -> bool:
        """Whether all ranks know by what the gradients of ``optimizers`` are scaled, and the norm is exact.

        A silent rank does not, if an update came after the others' last loss. A third of a square is not exact.
        """
        if len(self._scales(optimizers)) > 1:
            return False
        if self.world.max_norm is None:
            return True
        seen = self._look(optimizers)
        # The scaler compares sketches, which need not tell a small distance from none.
        is_clear = not any(
            0.01 < distance < 0.3
            for (_, name), one in seen.items()
            for (_, other_name), other in seen.items()
            if name == other_name
            for distance in one.distances(other)
        )
        return is_clear and 3 not in self._count_holders(seen)[0].values()

    def _scales(self, optimizers: Sequence[int]) -> set[float]:
        holders = {rank for rank, name in self.grads if self._has_gradient(rank, name, optimizers)}
        return {self._scale_on(rank) for rank in range(NUM_RANKS) if rank in holders or not self._is_idle[rank]}

    def _has_gradient(self, rank: int, name: str, optimizers: Sequence[int]) -> bool:
        return self.grads[rank, name] is not None and self.spec(name).optimizer in optimizers

    def _meet(self, optimizers: Sequence[int]) -> None:
        self.met += [index for index in optimizers if index not in self.met]

    def _agree(self, optimizers: Sequence[int], is_refused: bool) -> None:
        """Extends the table of tensors, if an optimizer is new or has new parameters."""
        self._meet(optimizers)
        names = {index: [spec.name for spec in self.tensors if spec.optimizer == index] for index in self.met}
        if self._table is not None and not self._looks_again:
            if is_refused or all(self._listed.get(index) == names[index] for index in optimizers):
                return
            self._num_exchanges += 1  # tells the ranks for which nothing is new, if there are such
        seen = self._look(optimizers)
        self._listed = names
        self._table = list(dict.fromkeys(name for rank in range(NUM_RANKS) for name in self._held(rank, self.met)))
        self._holders, are_final = self._count_holders(seen)
        self._num_looks += 1
        self._looks_again = self.world.max_norm is not None and not are_final and self._num_looks < 32
        if not self._looks_again:
            self._kept, self._num_looks = seen, 0

    def _held(self, rank: int, optimizers: Sequence[int]) -> list[str]:
        """Names of what the rank holds, in the order in which the optimizers were met."""
        specs = [spec for index in optimizers for spec in self.tensors if spec.optimizer == index]
        return [spec.name for spec in specs if (rank, spec.name) in self.params]

    def _look(self, optimizers: Sequence[int]) -> dict[Place, Seen]:
        """What tells replicas from others of their name, for all that is known once ``optimizers`` are met."""
        met = [*self.met, *(index for index in optimizers if index not in self.met)]
        places = [(rank, name) for rank in range(NUM_RANKS) for name in self._held(rank, met)]
        return {place: self._kept.get(place) or self._look_at(place) for place in places}

    def _look_at(self, place: Place) -> Seen:
        rank, name = place
        param, grad = self.params[place], self.grads[place]
        is_unscaled = self.stages[self.spec(name).optimizer] is Stage.UNSCALED
        wide = None if grad is None else grad.astype(np.float64) / (1.0 if is_unscaled else self._scale_on(rank))
        is_known = wide is not None and bool(np.isfinite(wide).all()) and bool(wide.any())
        return Seen(param.astype(np.float64), wide if is_known else None)

    def _count_holders(self, seen: dict[Place, Seen]) -> tuple[dict[Place, int], bool]:
        """And whether gradients have told all that they can."""
        holders: dict[Place, int] = {}
        are_final = True
        for name in dict.fromkeys(name for _, name in seen):
            left = sorted((place for place in seen if place[1] == name), key=lambda place: seen[place].lacks_gradient)
            while left:
                copies = [place for place in left if seen[left[0]].is_like(seen[place])]
                are_final &= len(copies) == 1 or not any(seen[place].lacks_gradient for place in copies)
                holders |= dict.fromkeys(copies, len(copies))
                told = [place for place in copies if not seen[place].lacks_gradient]
                holders |= dict.fromkeys(told, len(told))
                left = [place for place in left if place not in copies]
        return holders, are_final

    def _forget(self, optimizer: int, set_to_none: bool) -> None:
        self._fresh.discard(optimizer)
        self.clear(optimizer, set_to_none)
