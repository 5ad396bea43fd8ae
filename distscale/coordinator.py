"""From gradients to an agreed verdict: sweep, exchange, judge. All ranks go through it together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distscale.decision import Decision
from distscale.errors import ConfigError
from distscale.exchange import agreed_loss_scale, judge, mark_rank, pack
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.recipe import Recipe
from distscale.policy import NoScaling
from distscale.reducers import Reducer, default_group, default_reducer, picklable
from distscale.replicas import Look
from distscale.roster import NameSource, Roster
from distscale.situation import TABLE_CHANGES, Situation, digest_of_settings, settings_of
from distscale.sweep import Request, sweep
from distscale.sweep.early import EarlySweeps
from distscale.table import SlotTable, agree

__all__ = ["Coordinator"]

# Steps at whose gradients the ranks look to tell replicas apart, while some gradients are not there or not finite.
_MAX_LOOKS = 32


class Coordinator:
    """Holds what the ranks have agreed on once: who takes part, and which slot belongs to which tensor.

    Args:
        process_group: for the default reducer, which is made at the first step.
        reducer: instead of the default one.
        names: see :class:`~distscale.roster.Roster`.
        max_norm: see :class:`~distscale.DistributedGradScaler`.
        fp8: see :class:`~distscale.DistributedGradScaler`.
    """

    def __init__(
        self,
        process_group: ProcessGroup | DeviceMesh | None,
        reducer: Reducer | None,
        names: NameSource | None,
        max_norm: float | None,
        fp8: Fp8Scales | None = None,
    ) -> None:
        self.roster = Roster(names)
        self.max_norm = max_norm
        self.fp8 = fp8
        self.early_sweeps = EarlySweeps(max_norm is not None)
        self._process_group = process_group
        self._given_reducer = reducer
        self._reducer = reducer
        self._world: Callable[[], object] | None = None  # that the default reducer was made in; None: alone
        self._table: SlotTable | None = None
        self._looks_again = False  # agreed, as the table is
        self._num_looks = 0

    # A copy meets its optimizers and agrees on a table anew, in the job that it is in.

    def __reduce__(self) -> tuple[object, ...]:
        self._must_not_have_fp8()
        group = picklable(self._process_group)
        return Coordinator, (group, self._given_reducer, None, self.max_norm)  # names are of tensors of this process

    def __deepcopy__(self, memo: dict[int, object]) -> Coordinator:
        self._must_not_have_fp8()
        return Coordinator(self._process_group, self._given_reducer, self.roster.source, self.max_norm)

    def _must_not_have_fp8(self) -> None:
        if self.fp8 is not None:
            raise ConfigError(
                "a scaler with fp8= cannot be copied or pickled, for the FP8 scales are those of one model; make a "
                "scaler for the other model, and load state_dict() into it"
            )

    def decide(self, optimizers: Sequence[Optimizer], now: Situation) -> Decision:
        """Finds out whether all ranks may step ``optimizers``.

        A rank on which this fails takes part in the exchange all the same, so that its peers do not wait for it.

        Collective: yes, one exchange. At the first step a gather comes before it, and at each of the first 32 whose
        gradients are wanted to tell replicas apart; at a later step with an optimizer that is new or has other
        parameters, an exchange and a gather. Syncs host: no, but in those cases.

        Raises:
            DesyncError, ProtocolError: if the set-up fails.
            Exception: whatever kept this rank from sweeping its gradients.
        """
        self._meet_world()
        assert self._reducer is not None
        failure: Exception | None = None
        are_listed = True
        looks: dict[str, Look] = {}
        try:
            are_listed = self.roster.meet(optimizers) and (self.fp8 is None or self.fp8.is_agreed)
            if self._table is None or not are_listed or self._looks_again:
                # Ranks may have met the others at different times, so all list them as they are now.
                self.roster.meet(self.roster.optimizers)
                looks = self._look(now)
        except Exception as error:
            failure = error
        failure = failure or now.failure
        if self._table is not None and not are_listed and not self._looks_again:
            # Ranks that have nothing new are in their normal exchange: find that out there, not in a hang.
            self.raise_if_broken(self._exchange((), now, self._table, TABLE_CHANGES, None), now, TABLE_CHANGES)
        if self._table is None or not are_listed or self._looks_again:
            fp8 = self.fp8.tensors if self.fp8 is not None else ()
            self._table = agree(self._reducer, looks, self._settings(now), repr(failure) if failure else None, fp8)
            if self.fp8 is not None:
                self.fp8.agree([self._table.fp8], self._reducer.device(now.state.scale.device))
            self.roster.mark_listed()
            self._num_looks += 1
            self._looks_again = not self._table.is_final and self._num_looks < _MAX_LOOKS
            if not self._looks_again:
                self.roster.keep_looks(looks)
                self._num_looks = 0
        return self._exchange(optimizers, now, self._table, self._digest(now), failure)

    def _meet_world(self) -> None:
        """Makes the default reducer, and makes it again if the job has another default process group now.

        That can come into being after a first step alone, and be taken down and made again with fewer ranks.
        """
        world = default_group()
        is_known = self._world is None if world is None else self._world is not None and self._world() is world
        if self._given_reducer is None and (self._reducer is None or not is_known):
            self._reducer = default_reducer(self._process_group)
            self._world = None if world is None else weakref.ref(world)  # which must not keep the group alive
            self._table, self._looks_again, self._num_looks = None, False, 0
            self.roster.forget_looks()

    def _look(self, now: Situation) -> dict[str, Look]:
        if self.max_norm is None:
            return dict.fromkeys(self.roster.all_names, Look(None, 0))  # which are replicas matters to the norm alone
        assert self._reducer is not None
        return self.roster.look(self._reducer.world_size, now.unscaled(), float(now.loss_scale))

    def raise_if_broken(self, decision: Decision, now: Situation, digest: int | None = None) -> None:
        """Waits for a decision on the host, and raises if the ranks could not decide.

        All ranks come here at the same step, so that the error can name the ranks. Collective: only if it raises.
        """
        reducer = self._reducer
        assert reducer is not None

        def gather_values() -> list[dict[str, object]]:
            sent = self._digest(now) if digest is None else digest
            return reducer.gather({**self._settings(now), **now.agreed_values(sent)})

        decision.raise_if_broken(gather_values)

    @property
    def _recipe(self) -> Recipe | None:
        return None if self.fp8 is None else self.fp8.recipe

    def _settings(self, now: Situation) -> dict[str, object]:
        return settings_of(now.policy, self.max_norm, self._recipe)

    def _digest(self, now: Situation) -> int:
        """Of the table and of the settings, which may change on all ranks alike. 31 bits."""
        assert self._table is not None
        return self._table.digest ^ digest_of_settings(cast(Hashable, now.policy), self.max_norm, self._recipe)

    def _exchange(
        self, optimizers: Sequence[Optimizer], now: Situation, table: SlotTable, digest: int, failure: Exception | None
    ) -> Decision:
        assert self._reducer is not None
        reducer = self._reducer
        device = reducer.device(now.state.scale.device)
        inv_scale = now.loss_scale.double().reciprocal()
        want_norm = self.max_norm is not None
        try:
            is_whole = failure is None
            parts = self.roster.parts(optimizers, table, now.unscaled()) if is_whole else []
            request = Request(len(table.names), inv_scale, want_norm)
            done, parts = self.early_sweeps.take(parts, request)
            for optimizer, found in now.found if is_whole else ():
                done.append(found.swept(self.roster.names(optimizer), table, request, device))
            slots, sums, _ = sweep(parts, len(table.names), inv_scale, want_norm, device, done=done)
        except Exception as error:
            failure = error
            slots, sums, _ = sweep([], len(table.names), inv_scale, want_norm, device)
        slots = mark_rank(slots, reducer.rank)
        vector = sums
        if self.fp8 is not None and table.fp8:
            seen = self.fp8.collect(device)
            slots = torch.cat([slots, mark_rank(seen.bits, reducer.rank)])
            if table.num_sent:
                vector = seen.num_saturated if sums is None else torch.cat([sums, seen.num_saturated])
        has_scaled = now.has_scaled or isinstance(now.policy, NoScaling)
        flags = (now.stop, failure is not None, now.veto, has_scaled, not now.reads, now.trains)
        maxima = pack(
            reducer.rank,
            [reducer.rank + 1 if flag else 0 for flag in flags],
            now.step,
            digest,
            slots.new_zeros(()) if now.loss_bits is None else mark_rank(now.loss_bits, reducer.rank),
            now.state,
            now.loss_scale if now.knows_loss_scale else None,
            slots,
        )
        reducer.reduce_(maxima, vector)
        if failure is not None:
            raise failure
        num_saturated = vector[-table.num_sent :] if vector is not None and table.num_sent else None
        squares = vector[:1] if vector is not None and want_norm else None
        verdict = judge(maxima, squares, self.max_norm, table.num_decisive)
        outcome = verdict.outcome.on(now.state.scale.device)
        if now.outcome is not None:
            outcome = now.outcome.followed_by(outcome)
        next_state = now.policy.next_state(now.state, outcome)
        loss_scale = agreed_loss_scale(maxima, now.state.scale)
        return Decision(now.step, table, want_norm, maxima, verdict, loss_scale, outcome, next_state, num_saturated)
