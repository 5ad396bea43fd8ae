"""One decision for a DeepSpeed engine: our exchange answers its optimizer, and our policy owns the loss scale."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distscale.coordinator import Coordinator
from distscale.decision import Decision
from distscale.errors import ConfigError
from distscale.integrations.deepspeed.checkpoints import state_to_load
from distscale.integrations.deepspeed.recognition import can_skip, poison, surface_of
from distscale.integrations.deepspeed.roster import EngineRoster
from distscale.integrations.deepspeed.scale import ScaleOwner, scale_owner
from distscale.integrations.deepspeed.settings import BLOCK, Settings
from distscale.integrations.deepspeed.surfaces import Answer, Surface
from distscale.policy import Outcome
from distscale.record import StepReport
from distscale.reports import ReportQueue
from distscale.situation import Situation
from distscale.state import ScaleKeeper
from distscale.sweep import loss_bits

__all__ = ["Coordination"]

_log = logging.getLogger("distscale")
_LARGEST = torch.finfo(torch.float32).max


class Coordination:
    """What :func:`coordinate` makes of an engine; also ``engine.distscale``.

    The loop stays DeepSpeed's: ``engine.backward(loss)``, ``engine.step()``. The decision falls inside
    ``engine.step()`` at the boundary of gradient accumulation, for all ranks of the job together: one sweep, one
    exchange, one read on the host.

    Args:
        engine: as ``deepspeed.initialize`` returned it.
        settings: see there.

    Raises:
        ConfigError: if the engine cannot be coordinated, saying why; it is unchanged then.
    """

    def __init__(self, engine: Any, settings: Settings) -> None:
        if not hasattr(engine, "optimizer") or not hasattr(engine, "was_step_applied"):
            raise ConfigError(f"coordinate() takes what deepspeed.initialize() returned, not a {type(engine).__name__}")
        if isinstance(vars(engine).get(BLOCK), Coordination):
            raise ConfigError("this engine is coordinated already; engine.distscale is what coordinates it")
        self._engine = engine
        self._optimizer: Any = engine.optimizer
        self._owner: ScaleOwner = scale_owner(engine)
        known = surface_of(self._optimizer)
        self._surface: Surface | None = None if isinstance(known, str) or settings.deepspeed_check else known
        if self._surface is None:
            why = f"this is {known}" if isinstance(known, str) else "deepspeed_check is set"
            if not can_skip(self._optimizer):
                raise ConfigError(
                    f"{why}, and this release of DeepSpeed has no check of its own for a "
                    f"{type(self._optimizer).__name__} without fp16, so it could not skip a step; use a newer one"
                )
            _log.warning(
                "DeepSpeed's own overflow check decides, since %s: a skip is not explained by rank and tensor, and "
                "costs DeepSpeed's collectives and host reads",
                why,
            )
        device = torch.device(engine.device).type
        self._keeper = ScaleKeeper(device, settings.policy, True)
        norm = math.inf if self._surface is not None else None
        self._coordinator = Coordinator(None, settings.reducer, None, norm)
        self._coordinator.roster = EngineRoster(engine.module, self._surface)
        self._reports = ReportQueue(settings.on_step, settings.max_consecutive_skips)
        self._loss_bits: Tensor | None = None
        self._decision: Decision | None = None
        self._answer: Answer | None = None
        self._stop_requested = False
        self._veto_reason: str | None = None
        self._install()

    # ---------------------------------------------------------------- what users call

    @property
    def last_step(self) -> StepReport | None:
        """What was decided last; None before the first step. Syncs host: no, it is there when the step returns."""
        return self._reports.last

    def get_scale(self) -> float:
        """The loss scale of the coming step. Syncs host: yes, on a GPU."""
        return float(self._keeper.get_scale())

    def veto(self, reason: str) -> None:
        """Makes all ranks skip the coming step; see :meth:`distscale.DistributedGradScaler.veto`."""
        self._veto_reason = reason
        _log.warning("this rank vetoes the coming step: %s", reason)

    def request_stop(self) -> None:
        """Asks all ranks to end; see :meth:`distscale.DistributedGradScaler.request_stop`."""
        self._stop_requested = True

    def state_dict(self) -> dict[str, Any]:
        """As of the scaler; ``engine.save_checkpoint`` saves it. Collective: no. Syncs host: yes."""
        return self._keeper.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state; ``engine.load_checkpoint`` does it. Collective: no. Syncs host: yes.

        Raises:
            ConfigError: if it cannot be used; nothing is changed then.
        """
        before = self.get_scale()
        self._keeper.load_state_dict(state_dict)
        self._reports.forget()
        self._go_on()
        if self._loss_bits is not None and self.get_scale() != before:
            self.veto("a state was loaded between micro-batches, and the gradients of the first carry another scale")

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Has DeepSpeed's own scaler there, in the state of ours, while a checkpoint is written."""
        with self._owner.lend(self._keeper._policy, self._keeper.saved_state()):
            yield

    def resume(self, mine: Mapping[str, Any] | None, is_whole: bool) -> None:
        """Goes on after DeepSpeed has loaded a checkpoint. Collective: no. Syncs host: yes.

        Args:
            mine: the state that it holds of ours; None: it is of DeepSpeed alone, whose dynamic scale is taken over.
            is_whole: False if only a part was loaded, without the optimizer: the scale then stays as it is.
        """
        found, step = self._owner.take_over(), int(self._engine.global_steps)
        state = state_to_load(self._keeper._policy, mine, found, is_whole, step)
        if state is not None:
            self.load_state_dict(state)
        else:
            self._go_on()

    def _go_on(self) -> None:
        # What is known of the losses stays: DeepSpeed keeps the gradients of the micro-batches before a load.
        self._decision = self._answer = None
        self._owner.set(self.get_scale())

    # ---------------------------------------------------------------- the step

    def _install(self) -> None:
        if self._surface is not None:
            self._surface.install(self._answered)
        if hasattr(self._optimizer, "check_grad_overflow"):
            self._optimizer.check_grad_overflow = True  # in BF16 it can be switched off, and a bad step applied
        step = self._optimizer.step

        def step_and_commit(*args: Any, **kwargs: Any) -> Any:
            if self._surface is None and self._decided().skipped and not poison(self._optimizer):
                raise ConfigError(
                    f"the step is to be skipped, but distscale does not know where a {type(self._optimizer).__name__} "
                    "keeps its gradients, so it cannot make DeepSpeed skip; nothing was applied"
                )
            returned = step(*args, **kwargs)
            self._commit()
            return returned

        self._optimizer.step = step_and_commit
        # Reports raise what users are to see; the engine has finished its step then.
        name = "train_batch" if hasattr(type(self._engine), "train_batch") else "step"
        whole_step = getattr(self._engine, name)

        def step_and_report(*args: Any, **kwargs: Any) -> Any:
            returned = whole_step(*args, **kwargs)
            self._reports.drain()
            return returned

        setattr(self._engine, name, step_and_report)
        self._owner.watch(self._note_loss)
        self._owner.take_over()
        self._owner.set(self.get_scale())

    def _note_loss(self, loss: Tensor) -> None:
        bits = loss_bits(loss).to(self._keeper._state().scale.device, non_blocking=True)
        self._loss_bits = bits if self._loss_bits is None else torch.maximum(self._loss_bits, bits)

    def _decided(self) -> Decision:
        """The decision of the step at hand. Collective: yes, when first asked. Syncs host: yes, once."""
        if self._decision is None:
            keeper = self._keeper
            state = keeper._state()
            now = Situation(
                step=keeper._step,
                policy=keeper._policy,
                state=state,
                outcome=None,
                loss_scale=state.scale.clone(),
                knows_loss_scale=True,
                loss_bits=self._loss_bits,
                unscaled=frozenset,
                found=(),
                stop=self._stop_requested,
                veto=self._veto_reason is not None,
                has_scaled=True,  # DeepSpeed itself sees to it
                trains=True,
                failure=None,
                reads=True,
            )
            decision = self._coordinator.decide((), now)
            self._coordinator.raise_if_broken(decision, now)
            if decision.grad_norm > _LARGEST and not decision.skipped:
                decision = self._overflowed(decision)  # as to DeepSpeed; a square in the optimizer's state would be inf
            self._decision = decision
        return self._decision

    def _answered(self) -> Answer:
        if self._answer is None:
            decision = self._decided()
            norm = math.inf if decision.skipped else decision.grad_norm * decision.scale
            self._answer = Answer(decision.skipped, torch.tensor(norm, dtype=torch.float32, device="cpu"))
        return self._answer

    def _commit(self) -> None:
        decision = self._decided()
        if bool(getattr(self._optimizer, "overflow", False)) and not decision.skipped:
            decision = self._overflowed(decision)
        self._keeper._commit(decision.next_state)
        decision.settle(decision.next_state)
        if self._surface is not None:
            self._surface.clean_up(decision.skipped)
        self._begin_step()
        if decision.has_norm and not decision.skipped:
            self._optimizer._global_grad_norm = decision.grad_norm  # the unfused optimizer leaves the scale in it
        self._owner.set(decision.next_scale)
        self._reports.add(decision)

    def _overflowed(self, decision: Decision) -> Decision:
        """The same as a skip, for a reason beside single gradients that all ranks share."""
        yes, no = (torch.full_like(decision.outcome.overflow, value) for value in (True, False))
        outcome = Outcome(overflow=yes, lost=no, clean=no)
        return replace(
            decision,
            verdict=decision.verdict._replace(found_inf=torch.ones_like(decision.verdict.found_inf)),
            outcome=outcome,
            next_state=self._keeper._policy.next_state(self._keeper._state(), outcome),
            _copy=None,
        )

    def _begin_step(self) -> None:
        self._decision = self._answer = self._loss_bits = self._veto_reason = None
        self._coordinator.early_sweeps.clear()
