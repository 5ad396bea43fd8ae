"""What four ranks with one scaler have to do, in plain Python: no torch, no ranks, no devices.

One object knows the truth about all ranks. Where the scaler exchanges vectors, it just looks. Numbers are numpy's, in
the dtype that the tensors have, and the programs use powers of two, so nearly all sums and products are exact; where
one is rounded, it is rounded once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import ml_dtypes
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
    TensorSpec,
    Unscale,
    Update,
    Veto,
    World,
)

NUMPY_DTYPES: dict[str, np.dtype] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Place = tuple[int, str]  # rank, tensor


class Stage(Enum):
    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


class Refused(Exception):
    """The scaler must refuse this call; ``args[0]`` is the name of the error."""


@dataclass(frozen=True)
class Report:
    """What every rank's StepReport must say."""

    step: int
    skipped: bool
    scale: float
    next_scale: float
    grad_norm: float | None
    clip_coef: float | None
    culprit: tuple[int, str, str] | None
    amax: tuple[tuple[str, float], ...]
    vetoed_by: int | None
    stop_requested: bool


@dataclass(frozen=True)
class Trackers:
    """What the policy remembers."""

    scale: float
    growth: int
    hysteresis: int
    blocked: int


@dataclass
class _Decided:
    report: Report
    trackers: Trackers
    overflow: bool
    lost: bool
    clean: bool


@dataclass
class Expected:
    """What must be seen on every rank after a call."""

    error: str | None
    reports: list[Report]
    """That ``on_step`` got during the call."""
    last_step: Report | None
    """If the call was a step whose caller reads the report."""
    num_exchanges: int


class Oracle:
    """Plays a program's calls, one by one; its attributes are the state after the last one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tensors: list[TensorSpec] = []
        self.params: dict[Place, np.ndarray] = {}
        self.momenta: dict[Place, np.ndarray | None] = {}
        self.grads: dict[Place, np.ndarray | None] = {}
        for spec in world.tensors:
            self._create(spec)
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
        self.last_report: Report | None = None
        self._carried: list[float | None] = [None] * NUM_RANKS
        self._table: list[str] | None = None
        self._holders: dict[str, int] = {}
        self._listed: dict[int, list[str]] = {}
        self._waiting: deque[_Decided] = deque()
        self._fresh: set[int] = set()  # optimizers that hold gradients of the carried scale
        self._begin_step()

    def _begin_step(self) -> None:
        self.stages = [Stage.READY] * len(self.world.optimizers)
        self.veto: set[int] = set()
        self.decisions: list[_Decided] = []
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
            case Stop():
                self.stop = True
            case SetGrowthInterval(interval):
                self.growth_interval = interval
            case Restart(torch_format):
                self._restart(torch_format)
            case AddGroup(spec):
                self._create(spec)

    def _create(self, spec: TensorSpec) -> None:
        self.tensors.append(spec)
        for rank, numel in enumerate(spec.numels):
            if numel is not None:
                self.params[rank, spec.name] = np.zeros(numel, NUMPY_DTYPES[spec.dtype])
                self.grads[rank, spec.name] = self.momenta[rank, spec.name] = None

    def _backward(self, op: Backward) -> None:
        for rank, loss in enumerate(op.loss):
            if rank in op.idle or rank in self.world.silent:
                continue
            if self._is_idle[rank]:
                for optimizer in self._fresh:
                    self._multiply(rank, optimizer, np.float32(self.trackers.scale / self._scale_on(rank)))
                self._carried[rank] = self.trackers.scale
                self._is_idle[rank] = False
            self.has_scaled = True
            if not math.isfinite(loss) and self._lost.get(rank) != "nan":
                self._lost[rank] = "nan" if math.isnan(loss) else "inf"
        # The scale reaches the gradients through the loss's own dtype.
        carried = np.float32(NUMPY_DTYPES[op.loss_dtype].type(self.trackers.scale))
        for (rank, name), values in op.grads.items():
            place = rank, name
            dtype = self.params[place].dtype
            new = (np.array(values, np.float32) * carried).astype(dtype)
            old = self.grads[place]
            self.grads[place] = new if old is None else (old + new).astype(dtype)
            self._fresh.add(self._spec(name).optimizer)

    def _unscale(self, optimizer: int) -> None:
        if self.stages[optimizer] is not Stage.READY:
            raise Refused("ProtocolError")
        self._meet([optimizer])
        for rank in range(NUM_RANKS):
            self._multiply(rank, optimizer, np.float32(1 / self._scale_on(rank)))
        self.stages[optimizer] = Stage.UNSCALED

    def _step(self, op: Step) -> None:
        if any(self.stages[index] is Stage.STEPPED for index in op.optimizers):
            raise Refused("ProtocolError")
        decided = self._decide(op.optimizers)
        if not decided.report.skipped:
            for index in op.optimizers:
                self._apply(index, decided.report)
        for index in op.optimizers:
            self.stages[index] = Stage.STEPPED
            self._clear(index, op.set_to_none)

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
                self._multiply(rank, optimizer, np.float32(self.trackers.scale / old_scale))
        for decided in self.decisions:
            decided.report = replace(decided.report, next_scale=self.trackers.scale)
            decided.trackers = self.trackers
            self._waiting.append(decided)
        self.num_updates += 1
        for index in unstepped:  # what a user must do: they carry no scale any more
            self._clear(index, True)
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
            self.last_report = decided.report
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

    def _decide(self, optimizers: Sequence[int]) -> _Decided:
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
            if grad is None or self._spec(name).optimizer not in optimizers:
                continue
            inv_scale = 1.0 if self.stages[self._spec(name).optimizer] is Stage.UNSCALED else 1 / scale
            kind, highest = _look(grad, inv_scale)
            amax[name] = max(amax[name], highest) if not math.isnan(amax[name]) else math.nan
            if kind:
                found.setdefault(name, []).append((kind, rank))
                amax[name] = math.nan if kind == "nan" else amax[name]
            square += float(np.sum(np.square(grad.astype(np.float64)))) / self._holders[name] * inv_scale * inv_scale

        lost, overflow = bool(self._lost), bool(found)
        skipped = lost or overflow or bool(self.veto)
        culprit = None
        if lost:
            kind, rank = max((kind, rank) for rank, kind in self._lost.items())
            culprit = rank, "loss", kind
        elif overflow:
            name = max(found, key=self._table.index)
            kind, rank = max(found[name])  # "nan" sorts above "inf", as its bits do
            culprit = rank, name, kind
        decided = _Decided(Report(
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
        decided.trackers = self._next_trackers(decided)
        decided.report = replace(decided.report, next_scale=decided.trackers.scale)
        self.decisions.append(decided)
        return decided

    def _next_trackers(self, decided: _Decided) -> Trackers:
        world, now = self.world, self.trackers
        scale, growth, hysteresis, is_blocked = now.scale, now.growth, now.hysteresis, decided.lost
        if world.policy != "dynamic":
            is_blocked |= decided.overflow
        else:
            if decided.overflow:
                growth = 0
                hysteresis = max(hysteresis - 1, 0)
                if hysteresis == 0:
                    is_blocked |= scale <= world.min_scale
                    scale = float(np.float32(max(scale * world.backoff_factor, world.min_scale)))
            if decided.lost:
                growth = 0
            if decided.clean:
                growth += 1
                if growth >= self.growth_interval:
                    growth = 0
                    hysteresis = world.hysteresis
                    scale = float(np.float32(min(scale * world.growth_factor, world.max_scale)))
        blocked = now.blocked + 1 if is_blocked else 0 if decided.clean else now.blocked
        return Trackers(scale, growth, hysteresis, blocked)

    def _scale_on(self, rank: int) -> float:
        carried = self._carried[rank]
        return self.trackers.scale if carried is None else carried

    def _scale_of_gradients(self, optimizers: Sequence[int]) -> float:
        """That of all ranks which have gradients or have scaled a loss; the others do not know it."""
        scales = self._scales(optimizers)
        assert len(scales) < 2, "this program has no right answer"
        return scales.pop() if scales else self.trackers.scale

    def have_one_scale(self, optimizers: Sequence[int]) -> bool:
        """Whether all ranks know by what the gradients of ``optimizers`` are scaled.

        A silent rank does not, if an update came after the others' last loss.
        """
        return len(self._scales(optimizers)) < 2

    def _scales(self, optimizers: Sequence[int]) -> set[float]:
        holders = {rank for rank, name in self.grads if self._has_gradient(rank, name, optimizers)}
        return {self._scale_on(rank) for rank in range(NUM_RANKS) if rank in holders or not self._is_idle[rank]}

    def _has_gradient(self, rank: int, name: str, optimizers: Sequence[int]) -> bool:
        return self.grads[rank, name] is not None and self._spec(name).optimizer in optimizers

    def _meet(self, optimizers: Sequence[int]) -> None:
        self.met += [index for index in optimizers if index not in self.met]

    def _agree(self, optimizers: Sequence[int], is_refused: bool) -> None:
        """Extends the table of tensors, if an optimizer is new or has new parameters."""
        self._meet(optimizers)
        names = {index: [spec.name for spec in self.tensors if spec.optimizer == index] for index in self.met}
        if self._table is not None:
            if is_refused or all(self._listed.get(index) == names[index] for index in optimizers):
                return
            self._num_exchanges += 1  # tells the ranks for which nothing is new, if there are such
        self._listed = names
        mine = [
            [name for index in self.met for name in names[index] if (rank, name) in self.params]
            for rank in range(NUM_RANKS)
        ]
        self._table = list(dict.fromkeys(name for held in mine for name in held))
        self._holders = {name: sum(name in held for held in mine) for name in self._table}

    # ---------------------------------------------------------------- gradients and parameters

    def _spec(self, name: str) -> TensorSpec:
        return next(spec for spec in self.tensors if spec.name == name)

    def places(self, optimizer: int) -> list[Place]:
        """Where the optimizer has parameters."""
        return [place for place in self.params if self._spec(place[1]).optimizer == optimizer]

    def holds_gradients(self, optimizer: int) -> bool:
        return any(self.grads[place] is not None for place in self.places(optimizer))

    def _multiply(self, rank: int, optimizer: int, factor: np.float32) -> None:
        for place in self.places(optimizer):
            grad = self.grads[place]
            if grad is not None and place[0] == rank:
                self.grads[place] = _times(grad, factor)

    def _clear(self, optimizer: int, set_to_none: bool) -> None:
        self._fresh.discard(optimizer)
        for place in self.places(optimizer):
            grad = self.grads[place]
            self.grads[place] = None if set_to_none or grad is None else np.zeros_like(grad)

    def _apply(self, optimizer: int, report: Report) -> None:
        spec = self.world.optimizers[optimizer]
        carried = 1.0 if self.stages[optimizer] is Stage.UNSCALED else report.scale
        coef = 1.0 if report.clip_coef is None else report.clip_coef
        for place in self.places(optimizer):
            grad = self.grads[place]
            if grad is None:
                continue
            dtype, wide = grad.dtype, _wide(grad)
            if spec.fused:
                # The kernel divides, and keeps what it has formed in fp32 to the end.
                change = grad.astype(wide) / wide(np.float32(carried / coef))
            else:
                change = _times(grad, np.float32(coef / carried)).astype(wide)
            if spec.momentum:
                old = self.momenta[place]
                if old is not None:
                    change = wide(spec.momentum) * old.astype(wide) + change
                self.momenta[place] = change.astype(dtype)
                if not spec.fused:
                    change = change.astype(dtype).astype(wide)
            self.params[place] = (self.params[place].astype(wide) - wide(spec.lr) * change).astype(dtype)


def _look(grad: np.ndarray, inv_scale: float) -> tuple[str | None, float]:
    """Whether there is an inf or NaN in ``grad``, before or after unscaling, and its unscaled amax."""
    if grad.size == 0:
        return None, 0.0
    wide = np.abs(grad.astype(np.float64))
    if np.isnan(wide).any():
        return "nan", math.nan
    highest = float(wide.max())
    if math.isinf(highest):
        return "inf", math.inf
    unscaled = min(highest, _FLOAT32_MAX) * inv_scale
    largest = math.inf if grad.dtype == np.float64 else float(ml_dtypes.finfo(grad.dtype).max)
    return ("inf", math.inf) if unscaled > largest else (None, float(np.float32(min(unscaled, _FLOAT32_MAX))))


def _wide(values: np.ndarray) -> type[np.floating]:
    return np.float64 if values.dtype == np.float64 else np.float32


def _times(grad: np.ndarray, factor: np.float32) -> np.ndarray:
    wide = _wide(grad)
    return (grad.astype(wide) * wide(factor)).astype(grad.dtype)
