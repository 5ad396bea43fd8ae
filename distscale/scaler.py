"""DistributedGradScaler: torch's GradScaler with one decision for all ranks. The only class here that keeps state."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState, _refresh_per_optimizer_state
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distscale import checkpoint
from distscale.arguments import check_optimizers, make_policy, map_tensors, widened
from distscale.decision import Decision
from distscale.errors import ConfigError, ProtocolError
from distscale.exchange import judge, mark_rank, pack
from distscale.policy import MAX_SCALE, MIN_SCALE, DynamicScale, NoScaling, Outcome, Policy, ScaleState, StaticScale
from distscale.record import StepReport
from distscale.reducers import Reducer, default_reducer
from distscale.reports import ReportQueue
from distscale.roster import Listing, NameSource, Roster
from distscale.sweep import amax_bits, scale_, sweep
from distscale.table import SlotTable, agree

__all__ = ["DistributedGradScaler"]

# Sent in place of the table's digest by a rank that needs a new table; no digest is negative.
_TABLE_CHANGES = -1


class DistributedGradScaler(GradScaler):
    """Scales the loss, and takes one skip decision for all ranks in one small exchange a step.

    Used as ``torch.amp.GradScaler`` is, with its constructor and its order of calls::

        scaler = DistributedGradScaler(max_norm=1.0, names=model)
        ...
        scaler.scale(loss).backward()
        scaler.step(optimizer)          # collective: every rank calls it, with or without gradients
        scaler.update()
        if not scaler.last_step.skipped:
            lr_scheduler.step()

    The ranks may hold plain tensors or DTensors, sharded or replicated, on any mesh; they may lack gradients, or hold
    different tensors. Whichever rank finds a non-finite value, all skip and all hold bitwise the same scale.

    Args:
        device: "cuda" or "cpu", as in torch; a scaler for CUDA disables itself, with a warning, where there is none.
        init_scale: scale of the first step.
        growth_factor: > 1, multiplies the scale after ``growth_interval`` clean steps in a row.
        backoff_factor: in (0, 1), multiplies the scale when a step overflows.
        growth_interval: in steps.
        enabled: if False, ``scale`` returns its argument and ``step`` just steps; nothing is checked or exchanged.
        policy: "dynamic" (default), "static" (``init_scale`` for ever), "none" (scale 1: for BF16, where the finite
            check, the norm and the one decision are still wanted), or a policy object, which then brings its own rule.
        max_norm: clips the global norm of the unscaled gradients. ``math.inf`` only measures it; None does neither.
        process_group: the ranks that share one decision, a group or a mesh; default: all ranks of the job.
        reducer: talks to the other ranks in another way than ``torch.distributed``; excludes ``process_group``.
        names: names the tensors in reports: the model, or its ``named_parameters()``. Without it, reports give the
            optimizer, group and position.
        on_step: called with the :class:`StepReport` of every step, once it has arrived on the host.
        min_scale: floor of dynamic scaling.
        max_scale: cap of dynamic scaling.
        hysteresis: overflows since the last growth from which on the scale backs off; 1: at each, as in torch.
        max_consecutive_skips: raise :class:`ScaleExhaustedError` once this many steps were skipped, with no clean one
            between them, although the scale could not be lowered or the loss itself was not finite; None: never.

    Raises:
        ConfigError: (a ValueError) for an argument outside its range, naming both.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | str | None = None,
        max_norm: float | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        reducer: Reducer | None = None,
        names: NameSource | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = 100,
    ) -> None:
        rule = DynamicScale(
            init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
        )
        self._policy = make_policy(policy, rule)
        if max_norm is not None and not max_norm > 0:
            raise ConfigError(f"max_norm={max_norm!r} is not allowed: it must be above 0, math.inf to measure, or None")
        if max_consecutive_skips is not None and max_consecutive_skips < 1:
            raise ConfigError(f"max_consecutive_skips={max_consecutive_skips!r} is not allowed: at least 1, or None")
        if reducer is not None and process_group is not None:
            raise ConfigError("give reducer= or process_group=, not both: each says which ranks decide together")
        super().__init__(device, self._policy.init_scale, growth_factor, backoff_factor, growth_interval, enabled)

        self._max_norm = max_norm
        self._process_group = process_group
        self._reducer = reducer
        self._roster = Roster(names)
        self._table: SlotTable | None = None
        self._reports = ReportQueue(on_step, max_consecutive_skips)
        self._warm: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

        # The part of the state that torch's class does not have. As there, it moves to the device with the first loss.
        self._init_hysteresis_tracker = self._policy.hysteresis
        self._init_blocked_steps = 0
        self._hysteresis_tracker: Tensor | None = None
        self._blocked_steps: Tensor | None = None
        self._step = 0

        # Between a scale() and the next one with another scale.
        self._loss_scale: Tensor | None = None  # what the gradients carry; None until this rank scales a loss
        self._stepped: list[Optimizer] = []
        self._stop_requested = False
        self._begin()

    # ---------------------------------------------------------------- the calls of a step

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or every tensor of an iterable, by the scale.

        The product is formed and returned in fp32 (fp64 for fp64), so that an fp16 loss cannot overflow. A loss that is
        not finite is noticed here, on the device; all ranks then skip the step, and the scale stays as it is, since no
        scale can help. Collective: no. Syncs host: no.
        """
        if not self._enabled:
            return outputs
        return map_tensors(outputs, self._scaled)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale, for code that reads or changes them before ``step``.

        Not needed for clipping, see ``max_norm``. The check follows in ``step``, so that it covers what is done to the
        gradients in between. Collective: no. Syncs host: no.

        Raises:
            ProtocolError: if called twice for one step, or after it.
        """
        if not self._enabled:
            return
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        name = type(optimizer).__name__
        if stage is OptState.UNSCALED:
            raise ProtocolError(
                f"unscale_() was called twice for {name} since the last update(), which would divide its gradients twice. "
                "Call it once a step, after the last backward(); to clip, pass max_norm= to the scaler instead"
            )
        if stage is OptState.STEPPED:
            raise ProtocolError(f"unscale_() was called for {name} after its step(); call it before, or call update()")
        scale_(self._roster.values(optimizer), self._inv_scale().float())
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED

    def step(self, *optimizers: Optimizer, **kwargs: Any) -> Any:
        """Steps all ``optimizers``, or none of them if any rank found a reason to skip.

        Collective: yes, one exchange; every rank calls it equally often, also one that has no gradients, or no
        optimizer. Syncs host: no, if all optimizers are fused (``fused=True``) and have stepped before; else once.

        Args:
            optimizers: any number. Several share one decision and one norm.
            kwargs: passed on to each ``optimizer.step``. Closures are refused.

        Returns:
            What the optimizer's step returned; a list for several; None if skipped (not for fused optimizers, which
            skip on the device).

        Raises:
            DesyncError: if the ranks differ in scale, trackers, step or tensors; nothing was applied.
            ProtocolError: if called in an impossible order, or a peer failed; nothing was applied.
        """
        if "optimizer" in kwargs:
            optimizers = (kwargs.pop("optimizer"), *optimizers)
        check_optimizers(optimizers, kwargs)
        if not self._enabled:
            return _unwrap([optimizer.step(**kwargs) for optimizer in optimizers])
        for optimizer in optimizers:
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
                raise ProtocolError("step() has already been called since the last update(); call update() after it")

        decision = self._decide(optimizers)
        returned = []
        if all(map(self._steps_on_device, optimizers)) or not self._read(decision).skipped:
            self._unscale_rest([optimizer for optimizer in optimizers if not _takes_grad_scale(optimizer)], decision)
            returned = [self._apply(optimizer, decision, kwargs) for optimizer in optimizers]
        for optimizer in optimizers:
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        self._stepped += optimizers
        return _unwrap(returned)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves to the next step: commits the scale that the policy made of the decisions since the last update.

        Optimizers that were unscaled and not stepped are decided upon here, as in torch. Collective: only in that case.
        Syncs host: only if a decision has been read already.

        Args:
            new_scale: set the scale to this instead; the same on all ranks. fp32 tensor of one element, or a number.

        Raises:
            ProtocolError: if nothing was decided since the last update.
            ScaleExhaustedError: see ``max_consecutive_skips``. The scaler is then ready for a next step all the same.
        """
        if not self._enabled:
            return
        unstepped = [optimizer for optimizer in self._roster.optimizers if self._is_unscaled(optimizer)]
        if unstepped and new_scale is None:
            self._read(self._decide(unstepped))
        self._stepped += unstepped
        if new_scale is None and not self._decisions:
            raise ProtocolError("update() was called, but no step() since the last update(); call step(optimizer) first")
        state = self._decisions[-1].next_state if self._decisions else self._state()
        if new_scale is not None:
            state = state._replace(scale=_checked_scale(new_scale, state.scale))
        self._commit(state)
        for decision in self._decisions:
            decision.settle(state)
            self._reports.add(decision)
        self._begin()
        self._step += 1
        self._reports.drain(wait=False)

    # ---------------------------------------------------------------- beside the step

    def veto(self, reason: str) -> None:
        """Makes all ranks skip the coming step, for a reason of this rank's own; the scale stays as it is.

        Collective: no, it rides in the exchange of the next ``step``. Syncs host: no.
        """
        self._veto_reason = reason

    def request_stop(self) -> None:
        """Asks all ranks to end: ``last_step.stop_requested`` is True on all of them after the same step.

        May be called from a signal handler. Collective: no, it rides in the exchange of the next ``step``.
        """
        self._stop_requested = True

    @property
    def last_step(self) -> StepReport | None:
        """What was decided last; None before the first step, or if disabled. Syncs host: yes, asking is what costs it.

        Raises:
            DesyncError, ProtocolError, ScaleExhaustedError: if the last steps of fused optimizers came to that.
        """
        if self._decisions:
            return self._decisions[-1].report()
        self._reports.drain(wait=True)
        return self._reports.last

    def set_growth_factor(self, new_factor: float) -> None:
        """As in torch; checked at once, and equal on all ranks."""
        self._change_rule(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As in torch; checked at once, and equal on all ranks."""
        self._change_rule(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As in torch; checked at once, and equal on all ranks."""
        self._change_rule(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs, as plain numbers and strings; torch's GradScaler can load it too.

        To be taken after ``update()``. Empty if disabled. Collective: no, it is equal on all ranks. Syncs host: yes.
        """
        if not self._enabled:
            return {}
        if self._scale is None:
            trackers = (self._init_growth_tracker, self._init_hysteresis_tracker, self._init_blocked_steps)
        else:
            state = self._state()
            trackers = tuple(int(t) for t in (state.growth_tracker, state.hysteresis_tracker, state.blocked_steps))
        return checkpoint.encode(self._policy, checkpoint.SavedState(self.get_scale(), *trackers, self._step))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state of this class or of torch's GradScaler, on any number of ranks; all load the same.

        Collective: no. Syncs host: no.

        Raises:
            ConfigError: if the state cannot be used; nothing is changed then.
        """
        if not self._enabled:
            return
        self._policy, saved = checkpoint.decode(self._policy, state_dict)
        for key in checkpoint.TORCH_RULE_FIELDS:
            setattr(self, f"_{key}", getattr(self._policy, key, state_dict[key]))
        self._init_scale = saved.scale
        self._init_growth_tracker = saved.growth_tracker
        self._init_hysteresis_tracker = saved.hysteresis_tracker
        self._init_blocked_steps = saved.blocked_steps
        self._step = saved.step
        self._loss_scale = None
        self._begin()
        if self._scale is not None:
            device, self._scale, self._growth_tracker = self._scale.device, None, None
            self._lazy_init_scale_growth_tracker(device)

    # ---------------------------------------------------------------- the decision

    def _decide(self, optimizers: Sequence[Optimizer]) -> Decision:
        """Sweeps, exchanges and judges. A rank on which this fails takes part all the same, then raises."""
        if self._reducer is None:
            self._reducer = default_reducer(self._process_group)
        reducer = self._reducer
        self._ensure_state()
        failure: Exception | None = None
        listings: set[Listing] = set()
        try:
            listings = self._roster.meet(optimizers)
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            failure = error
        if Listing.CHANGED in listings:
            self._read(self._exchange(reducer, (), _TABLE_CHANGES, None))
            self._decisions.pop()
        if self._table is None or listings - {Listing.LISTED}:
            self._table = agree(reducer, self._roster.names, self._settings(), failure and repr(failure))
            self._roster.mark_listed()
        decision = self._exchange(reducer, optimizers, self._table.digest, failure)
        for optimizer in optimizers:
            found_inf = decision.verdict.found_inf
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found_inf.device: found_inf}
        return decision

    def _exchange(
        self, reducer: Reducer, optimizers: Sequence[Optimizer], digest: int, failure: Exception | None
    ) -> Decision:
        assert self._table is not None
        state, loss_scale = self._state(), self._carried_scale().clone()
        device = reducer.device(state.scale.device)
        num_slots, want_norm = len(self._table.names), self._max_norm is not None
        unscaled = [optimizer for optimizer in optimizers if self._is_unscaled(optimizer)]
        try:
            parts = self._roster.parts(optimizers, self._table, unscaled) if failure is None else []
            slots, sums = sweep(parts, num_slots, self._inv_scale(), want_norm, device)
        except Exception as error:  # as above
            failure = error
            slots, sums = sweep([], num_slots, self._inv_scale(), want_norm, device)
        raised = (
            self._stop_requested,
            failure is not None,
            self._veto_reason is not None,
            self._loss_scale is not None or isinstance(self._policy, NoScaling),
            bool(unscaled),
        )
        maxima = pack(
            [reducer.rank + 1 if flag else 0 for flag in raised],
            self._step,
            digest,
            mark_rank(self._loss_bits, reducer.rank) if self._loss_bits is not None else slots.new_zeros(()),
            state,
            loss_scale,
            mark_rank(slots, reducer.rank),
        )
        reducer.reduce_(maxima, sums)
        if failure is not None:
            raise failure
        verdict = judge(maxima, sums, self._max_norm)
        here = Outcome(*(flag.to(state.scale.device) for flag in verdict.outcome))
        self._outcome = here if self._outcome is None else self._outcome.followed_by(here)
        next_state = self._policy.next_state(state, self._outcome)
        decision = Decision(self._step, self._table, want_norm, maxima, verdict, loss_scale, next_state)
        self._decisions.append(decision)
        return decision

    def _read(self, decision: Decision) -> Decision:
        """Waits for the decision on the host; all ranks come here at the same step, so errors can name the ranks."""
        assert self._reducer is not None
        reducer = self._reducer
        decision.raise_if_broken(lambda: reducer.gather(self._agreed_values()))
        return decision

    # ---------------------------------------------------------------- applying it

    def _steps_on_device(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer can be stepped without asking the host whether to.

        A fused optimizer that creates its state in a step that is skipped leaves what the kernel did not write: zeros
        in Adam, and uninitialized memory as the momentum of SGD. So the host is asked until all states exist.
        """
        return _takes_grad_scale(optimizer) and _num_gradients(optimizer) <= self._warm.get(optimizer, -1)

    def _unscale_rest(self, optimizers: Sequence[Optimizer], decision: Decision) -> None:
        """Brings the gradients to their final values, in one multiplication, each once."""
        clip = decision.verdict.clip_coef
        for is_unscaled in (False, True):
            chosen = [optimizer for optimizer in optimizers if self._is_unscaled(optimizer) is is_unscaled]
            if chosen and decision.clip_coef != (1.0 if is_unscaled else decision.scale):
                factor = clip if is_unscaled else clip * self._inv_scale().to(clip.device)
                scale_(self._roster.values(*chosen), factor.float())

    def _apply(self, optimizer: Optimizer, decision: Decision, kwargs: dict[str, Any]) -> Any:
        if not _takes_grad_scale(optimizer):
            return optimizer.step(**kwargs)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if not self._is_unscaled(optimizer) or self._max_norm is not None:
            carried = 1.0 if self._is_unscaled(optimizer) else decision.loss_scale.double()
            own = carried / decision.verdict.clip_coef.to(decision.loss_scale.device)
            grad_scale = (own if grad_scale is None else own * grad_scale).float()
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = decision.verdict.found_inf  # type: ignore[attr-defined]
        try:
            return optimizer.step(**kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            self._warm[optimizer] = _num_gradients(optimizer)

    # ---------------------------------------------------------------- the state

    def _scaled(self, loss: Tensor) -> Tensor:
        self._ensure_state(loss.device)
        assert self._scale is not None
        if self._scale_changed:
            self._bring_pending_gradients_to(self._scale)
            self._loss_scale = self._scale.clone()
            self._scale_changed = False
        assert self._loss_scale is not None
        if loss.dtype.is_floating_point:
            local = loss.detach().to_local() if isinstance(loss, DTensor) else loss.detach()
            bits = amax_bits([local])[0].to(self._scale.device, non_blocking=True)
            self._loss_bits = bits if self._loss_bits is None else torch.maximum(self._loss_bits, bits)
        return widened(loss) * self._loss_scale.to(loss.device, non_blocking=True)

    def _bring_pending_gradients_to(self, scale: Tensor) -> None:
        """Rescales gradients that wait, unstepped, from before the last update, so that new ones can be added.

        Without it, an optimizer that steps more rarely than ``update()`` is called would sum gradients of two scales.
        """
        if self._loss_scale is None:
            return
        pending = [optimizer for optimizer in self._roster.optimizers if optimizer not in self._stepped]
        scale_(self._roster.values(*pending), (scale.double() / self._loss_scale.double()).float())
        self._stepped = []

    def _carried_scale(self) -> Tensor:
        """The scale that the gradients carry: of the last scaled loss, which an update in between does not change."""
        if self._loss_scale is not None:
            return self._loss_scale
        self._ensure_state()
        assert self._scale is not None
        return self._scale

    def _inv_scale(self) -> Tensor:
        """float64, so that it is exact for every power of two."""
        return self._carried_scale().double().reciprocal()

    def _ensure_state(self, device: torch.device | None = None) -> None:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device or torch.device(self._device))

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._blocked_steps = torch.full((), self._init_blocked_steps, dtype=torch.int32, device=dev)

    def _state(self) -> ScaleState:
        assert self._scale is not None and self._growth_tracker is not None
        assert self._hysteresis_tracker is not None and self._blocked_steps is not None
        return ScaleState(self._scale, self._growth_tracker, self._hysteresis_tracker, self._blocked_steps)

    def _commit(self, state: ScaleState) -> None:
        for mine, new in zip(self._state(), state, strict=True):
            mine.copy_(new)

    def _begin(self) -> None:
        """Forgets what belongs to the step that has ended."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._scale_changed = True
        self._loss_bits: Tensor | None = None
        self._veto_reason: str | None = None
        self._decisions: list[Decision] = []
        self._outcome: Outcome | None = None

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        state = self._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def _settings(self) -> dict[str, object]:
        """What all ranks must have in common before the first exchange, whose size depends on it."""
        return {"policy": self._policy.name, **asdict(self._policy), "max_norm": self._max_norm}  # type: ignore[call-overload]

    def _agreed_values(self) -> dict[str, object]:
        """For an error message: this rank's side of the values that the exchange compares."""
        assert self._table is not None
        scale, *trackers = self._state()
        return {
            "scale": float(scale),
            "loss_scale": float(self._carried_scale()),
            **{key: int(value) for key, value in zip(ScaleState._fields[1:], trackers, strict=True)},
            "step": self._step,
            "the table of tensors": self._table.digest,
        }

    def _change_rule(self, **changes: float) -> None:
        if not isinstance(self._policy, DynamicScale):
            raise ConfigError(f"{', '.join(changes)} has no meaning with policy {self._policy.name!r}")
        self._policy = replace(self._policy, **changes)  # type: ignore[arg-type]
        for key, value in changes.items():
            setattr(self, f"_{key}", value)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            saved = self.state_dict()
            state |= {f"_init_{key}": saved[key] for key in ("hysteresis_tracker", "blocked_steps")}
        # What belongs to this process: an unpickled scaler meets its optimizers and agrees on a table anew.
        per_process = ("_hysteresis_tracker", "_blocked_steps", "_loss_scale", "_table", "_roster", "_warm", "_stepped")
        return {**state, **dict.fromkeys(per_process)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roster, self._warm, self._stepped = Roster(), WeakKeyDictionary(), []


def _takes_grad_scale(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and (
        "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def _num_gradients(optimizer: Optimizer) -> int:
    return sum(param.grad is not None for group in optimizer.param_groups for param in group["params"])


def _checked_scale(new_scale: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(new_scale, Tensor):
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ConfigError("update(new_scale) takes a number or a tensor of one element that requires no gradient")
        return new_scale.detach().to(like).reshape(())
    StaticScale(new_scale)
    return torch.full_like(like, new_scale)


def _unwrap(returned: list[Any]) -> Any:
    return None if not returned else returned[0] if len(returned) == 1 else returned
