"""DistributedGradScaler: the half of the scaler that decides with the other ranks, and the one class that users see."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distscale.apply import Stepper, may_rehearse, params_of
from distscale.arguments import check_max_norm, check_step, make_policy, read_scale, split_optimizers
from distscale.coordinator import Coordinator
from distscale.decision import Decision
from distscale.errors import ConfigError, ProtocolError
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.saved import split
from distscale.fp8.steps import end_step, warn_if_forgotten
from distscale.local import LocalScaler
from distscale.policy import MAX_SCALE, MIN_SCALE, DynamicScale, Policy
from distscale.record import StepReport
from distscale.reducers import Reducer
from distscale.reports import ReportQueue
from distscale.roster import NameSource, Roster
from distscale.shards import drop_fp8
from distscale.situation import Situation
from distscale.sweep.early import EarlySweeps

__all__ = ["DistributedGradScaler"]

_log = logging.getLogger("distscale")


class DistributedGradScaler(LocalScaler):
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

    An optimizer may step more rarely than ``update()`` is called: gradients that wait are rescaled. But only from its
    first step on, since until then the scaler does not know it.

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
            optimizer, group and position. In the norm, plain tensors of one name are replicas of one gradient if their
            values and first gradients are equal but for rounding, else tensors of their own, as in the stages of a
            pipeline; see :mod:`distscale.replicas`.
        fp8: the FP8 scales of the model; see :mod:`distscale.fp8`. For FP8 without a loss scale, ``policy="none"``.
        on_step: called with the :class:`StepReport` of every step, once it has arrived on the host.
        min_scale: floor of dynamic scaling.
        max_scale: cap of dynamic scaling.
        hysteresis: overflows since the last growth from which on the scale backs off; 1: at each, as in torch.
        hysteresis_refill: clean steps in a row, 2 or more, after which those overflows are counted anew; None: only
            growth does that.
        growth_delay: clean steps that the first growth after an overflow, or of all, takes beyond ``growth_interval``.
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
        fp8: Fp8Scales | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        hysteresis: int = 1,
        hysteresis_refill: int | None = None,
        growth_delay: int = 0,
        max_consecutive_skips: int | None = 100,
    ) -> None:
        rule = DynamicScale(
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            max_scale,
            hysteresis_refill,
            growth_delay,
        )
        check_max_norm(max_norm)
        if reducer is not None and process_group is not None:
            raise ConfigError("give reducer= or process_group=, not both: each says which ranks decide together")
        if fp8 is not None and not isinstance(fp8, Fp8Scales):
            raise ConfigError(f"fp8={fp8!r} is not allowed: what convert_to_fp8(model, recipe) returned, or None")
        if fp8 is not None and not enabled:
            raise ConfigError(
                "fp8= needs enabled=True, for FP8 scales come from its steps; policy='none' is without a scale"
            )
        if fp8 is None and enabled:
            warn_if_forgotten(names)
        self._coordinator = Coordinator(process_group, reducer, names, max_norm, fp8)
        super().__init__(device, make_policy(policy, rule), enabled, self._coordinator.roster)
        if fp8 is not None and not self._enabled:
            raise ConfigError(
                f"fp8= needs a scaler that works, and device={device!r} disables this one, for there is no CUDA here; "
                "on a CPU, give device='cpu'"
            )
        self._reports = ReportQueue(on_step, max_consecutive_skips)
        self._stop_requested = False
        self._failure: Exception | None = None  # that left this rank's parameters in doubt

        # Between two updates.
        self._veto_reason: str | None = None
        self._veto_is_sent = False
        self._decisions: list[Decision] = []
        self._has_rehearsed = False  # the optimizers' state was created; update() has nothing to commit then

    def _follow(self, roster: Roster) -> None:
        super()._follow(roster)
        self._stepper = Stepper(roster)

    # ---------------------------------------------------------------- the calls of a step

    def step(self, *optimizers: Optimizer | None, **kwargs: Any) -> Any:
        """Steps all ``optimizers``, or none of them if any rank found a reason to skip.

        Collective: yes, one exchange; every rank calls it equally often, also one that has no gradients, or no
        optimizer. Syncs host: no, if all optimizers are fused (``fused=True``) and have stepped before; else once.

        Args:
            optimizers: any number. Several share one decision and one norm. A None after them is taken for the closure
                that is not there.
            kwargs: passed on to each ``optimizer.step``. Closures are refused, unless the scaler is disabled.

        Returns:
            What the optimizer's step returned; a list for several; None if skipped (not for fused optimizers, which
            skip on the device).

        Raises:
            DesyncError: if the ranks differ in scale, trackers, step or tensors; nothing was applied.
            ProtocolError: if called in an impossible order, or a peer failed; nothing was applied.
        """
        if "optimizer" in kwargs:
            optimizers = (kwargs.pop("optimizer"), *optimizers)
        chosen, rest = split_optimizers(optimizers)
        if self._enabled or not chosen:
            check_step(chosen, rest, kwargs)
        if not self._enabled:
            returned = [optimizer.step(*rest, **kwargs) for optimizer in chosen]
            self._reports.last = StepReport.unchecked(self._step)
            return returned[0] if len(returned) == 1 else returned
        return self._step_together(chosen, kwargs)

    def _step_together(self, optimizers: Sequence[Optimizer], kwargs: dict[str, Any]) -> Any:
        for optimizer in optimizers:
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
                raise ProtocolError("step() has already been called since the last update(); call update() after it")
        failure: Exception | None = None
        try:
            self._unscale_as_overridden(optimizers)
        except Exception as error:  # of a subclass; the other ranks are to hear of it in the exchange
            failure = error

        trains = self._loss_bits is not None or not optimizers or not all(map(may_rehearse, optimizers))
        reads = not trains or not optimizers or not all(map(self._steps_on_device, optimizers))
        decision = self._decide(optimizers, reads, failure, trains)
        returned = []
        if not (reads and decision.skipped):
            try:
                unscaled = self._unscaled_ids(optimizers)
                returned = self._stepper.step(optimizers, decision, unscaled, self._is_unscaled, kwargs)
                self._carried.note_applied(optimizers, decision)
            except BaseException as error:
                # Other ranks may have applied this step, and here it may be half done: nothing can be trusted now.
                self._failure = ProtocolError(
                    f"the optimizer step {self._step} failed on this rank ({error!r}) after all ranks had agreed to "
                    "apply it, so its parameters are not those of the other ranks. Restart from a checkpoint"
                )
                raise
        else:
            for optimizer in optimizers:
                drop_fp8(params_of(optimizer))
        self._carried.note_stepped(optimizers)
        if not trains and decision.is_rehearsal:
            self._decisions.pop()
            self._has_rehearsed, self._veto_is_sent = True, False
        else:
            for optimizer in optimizers:
                self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        return returned[0] if len(returned) == 1 else returned or None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves to the next step: commits the scale that the policy made of the decisions since the last update.

        It changes and counts nothing if all that was stepped since are optimizers without state at learning rate 0,
        with gradients of zeros and no loss, on all ranks: ``torch.distributed.checkpoint`` creates their state so.

        Optimizers that were unscaled and not stepped are decided upon here, as in torch. Collective: only in that case.
        Syncs host: only if a decision has been read already.

        Args:
            new_scale: set the scale to this instead; the same on all ranks. A number within the policy's bounds, or an
                fp32 tensor of one element, which is clamped to them.

        Raises:
            ProtocolError: if nothing was decided since the last update.
            ScaleExhaustedError: see ``max_consecutive_skips``. The scaler is then ready for a next step all the same.
        """
        if not self._enabled:
            self._step += 1
            return
        unstepped = self._unscaled()
        if unstepped and new_scale is None:
            self._decide(unstepped, reads=True)
        self._carried.note_stepped(unstepped)
        if self._has_rehearsed and not self._decisions and new_scale is None:
            self._begin_step()
            return
        if new_scale is None and not self._decisions:
            raise ProtocolError(
                "update() was called without a step() since the last update(); call step(optimizer) first"
            )
        state = self._decisions[-1].next_state if self._decisions else self._state()
        if new_scale is not None:
            state = state._replace(scale=read_scale(new_scale, self._policy, state.scale))
        old_scale = self._state().scale.clone()
        self._commit(state)
        self._carried.update(old_scale, state.scale)
        if self._coordinator.fp8 is not None:
            end_step(self._coordinator.fp8, self._decisions, old_scale, state.scale)
        for decision in self._decisions:
            decision.settle(state)
            self._reports.add(decision)
        num_on_the_way = sum(not decision.is_at_hand for decision in self._decisions)
        self._begin_step()
        # What the host has not read yet is read one update later: it has arrived by then, so nobody waits, and ranks
        # that raise an error raise it at the same step.
        self._reports.drain(keep=num_on_the_way)

    # ---------------------------------------------------------------- beside the step

    def veto(self, reason: str) -> None:
        """Makes all ranks skip the coming step, for a reason of this rank's own; the scale stays as it is.

        The report says which rank it was; the reason goes to this rank's log (``logging.getLogger("distscale")``).
        Collective: no, it rides in the exchange of the next ``step``. Syncs host: no.
        """
        self._veto_reason, self._veto_is_sent = reason, False
        _log.warning("this rank vetoes the coming step: %s", reason)

    def request_stop(self) -> None:
        """Asks all ranks to end: ``last_step.stop_requested`` is True on all of them after the same step.

        May be called from a signal handler. Collective: no, it rides in the exchange of the next ``step``.
        """
        self._stop_requested = True

    @property
    def early_sweeps(self) -> EarlySweeps:
        """Takes what is swept before ``step``; see :func:`distscale.integrations.fsdp.overlap`."""
        return self._coordinator.early_sweeps

    @property
    def last_step(self) -> StepReport | None:
        """What was decided last; None before the first step. Syncs host: yes, asking is what costs it.

        A disabled scaler decides nothing: its report is that the step was applied, at scale 1.

        Raises:
            DesyncError, ProtocolError, ScaleExhaustedError: if the last steps of fused optimizers came to that.
        """
        if self._decisions:
            self._decisions[-1].raise_if_broken()
            return self._decisions[-1].report()
        self._reports.drain()
        return self._reports.last

    def state_dict(self) -> dict[str, Any]:
        """As in :class:`LocalScaler`, with the FP8 histories if there are any."""
        state = super().state_dict()
        fp8 = self._coordinator.fp8
        return {**state, "fp8": fp8.state_dict()} if state and fp8 is not None else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state of this class, or of torch's GradScaler; on any number of ranks, and all load the same.

        A state without FP8 histories, as of a run without FP8, lets them begin anew. Collective: no. Syncs host: no.

        Raises:
            ConfigError: if the state cannot be used; nothing is changed then.
        """
        fp8 = self._coordinator.fp8
        rest, histories = (
            split(state_dict, None if fp8 is None else fp8.recipe) if self._enabled else (state_dict, None)
        )
        super().load_state_dict(rest)
        if fp8 is not None and self._enabled:
            fp8.forget() if histories is None else fp8.load_state_dict(histories)
            fp8.hand_out(torch.tensor(self.get_scale()))
        self._carried.forget_losses()
        self._failure = None
        self._stepper.forget()  # the optimizers are likely to be restored too
        self._reports.forget()
        self._begin_step()

    # ---------------------------------------------------------------- the decision and its application

    def _decide(
        self, optimizers: Sequence[Optimizer], reads: bool, failure: Exception | None = None, trains: bool = True
    ) -> Decision:
        now = Situation(
            step=self._step,
            policy=self._policy,
            state=self._state(),
            outcome=self._decisions[-1].outcome if self._decisions else None,
            loss_scale=self._carried_scale().clone(),
            knows_loss_scale=self._carried.is_known(optimizers),
            loss_bits=self._loss_bits,
            unscaled=lambda: self._unscaled_ids(optimizers),
            found=[(optimizer, self._found(optimizer)) for optimizer in optimizers if self._is_unscaled(optimizer)],
            stop=self._stop_requested,
            veto=self._veto_reason is not None,
            has_scaled=self._carried.has_scaled,
            trains=trains,
            failure=self._failure or failure,
            reads=reads,
        )
        decision = self._coordinator.decide(optimizers, now)
        if reads:
            self._coordinator.raise_if_broken(decision, now)
        self._decisions.append(decision)
        self._veto_is_sent = now.veto
        found_inf = decision.verdict.found_inf
        for optimizer in optimizers:
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found_inf.device: found_inf}
        return decision

    def _steps_on_device(self, optimizer: Optimizer) -> bool:
        return self._stepper.steps_on_device(optimizer)

    def _begin_step(self) -> None:
        super()._begin_step()
        if self._veto_is_sent:
            self._veto_reason, self._veto_is_sent = None, False
        self._decisions = []
        self._has_rehearsed = False
        self._coordinator.early_sweeps.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._reports.drain()
        # The copy meets its optimizers anew; see Coordinator.
        of_optimizers = dict.fromkeys(("_roster", "_carried", "_stepper"))
        return {**super().__getstate__(), **of_optimizers, "_stop_requested": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow(self._coordinator.roster)
