"""The half of a scaler that talks to no other rank: it multiplies losses by the scale, and divides gradients by it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from distscale.apply import params_of
from distscale.arguments import map_tensors
from distscale.carried import CarriedScale
from distscale.errors import ProtocolError
from distscale.integrations.pipelining import is_dry_run
from distscale.policy import Policy
from distscale.roster import Roster
from distscale.shards import restore_fp8
from distscale.state import ScaleKeeper
from distscale.sweep import loss_bits
from distscale.unscaling import Found, unscale

__all__ = ["LocalScaler"]


class LocalScaler(ScaleKeeper):
    """``scale`` and ``unscale_``, and what they leave for the step: bad losses, bad gradients, the stage of optimizers.

    Args:
        device: as in torch.
        policy: brings the scale to begin with.
        enabled: as in torch.
        roster: of the optimizers.
    """

    def __init__(self, device: str, policy: Policy, enabled: bool, roster: Roster) -> None:
        super().__init__(device, policy, enabled)
        self._follow(roster)
        self._loss_bits: Tensor | None = None

    def _follow(self, roster: Roster) -> None:
        self._roster = roster
        self._carried = CarriedScale(roster)

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or every tensor of an iterable, by the scale.

        The product is formed and returned in fp32 (fp64 for fp64), so that an fp16 loss cannot overflow. Its gradient,
        which is the scale, can: autograd casts it to the dtype of the loss, and 65536 is inf in fp16. So compute the
        loss in fp32.

        A loss that is not finite is noticed here, on the device, even if its backward pass is never run; all ranks then
        skip the step, and the scale stays as it is, since no scale can help. Collective: no. Syncs host: no.
        """
        if not self._enabled:
            return outputs
        return map_tensors(outputs, self._scaled)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale, for code that reads or changes them before ``step``.

        Not needed for clipping, see ``max_norm``. What is not finite here makes all ranks skip in ``step``, even if it
        is clamped or overwritten before; and ``step`` checks again what was done to the gradients in between. Until
        then ``_found_inf_per_device(optimizer)`` holds what this rank alone has found; a flag set in it counts.

        Collective: no. Syncs host: no.

        Raises:
            ProtocolError: if called twice for one step, or after it.
        """
        if not self._enabled:
            return
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        name = type(optimizer).__name__
        if stage is OptState.UNSCALED:
            raise ProtocolError(
                f"unscale_() was called twice for {name} since the last update(), which divides its gradients twice. "
                "Call it once a step, after the last backward(); to clip, pass max_norm= to the scaler instead"
            )
        if stage is OptState.STEPPED:
            raise ProtocolError(f"unscale_() was called for {name} after its step(); call it before, or call update()")
        restore_fp8(params_of(optimizer))
        inv_scale = self._carried_scale().double().reciprocal().float()
        self._roster.meet([optimizer])
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, torch.zeros_like(inv_scale), True)
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Unscales and checks this rank's gradients of ``optimizer``, under the name and signature of torch's.

        A subclass may override it, or ``unscale_``, for gradients that are not in ``grad``; then ``step`` calls
        ``unscale_``, as torch's does. Collective: no. Syncs host: no.

        Args:
            inv_scale: fp32, one element.
            found_inf: fp32, one element: not 0 if something is known to be not finite.
            allow_fp16: has no meaning; fp16 gradients are always unscaled.

        Returns:
            By device, fp32, shape of ``found_inf``: not 0 if a value was not finite, before or after unscaling.
        """
        self._roster.meet([optimizer])
        found, bits = unscale(self._roster.held([optimizer]), self._unscaled_ids([optimizer]), inv_scale, found_inf)
        if id(optimizer) in self._per_optimizer_states:
            self._per_optimizer_states[id(optimizer)]["amax_bits"] = bits
        return found

    # ---------------------------------------------------------------- for the step

    def _unscale_as_overridden(self, optimizers: Sequence[Optimizer]) -> None:
        """Unscales in the way of a subclass that has one of its own."""
        mine = type(self)
        own = (LocalScaler.unscale_, LocalScaler._unscale_grads_)
        for optimizer in optimizers if (mine.unscale_, mine._unscale_grads_) != own else ():
            if not self._is_unscaled(optimizer):
                self.unscale_(optimizer)

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        state = self._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def _unscaled(self) -> list[Optimizer]:
        return [optimizer for optimizer in self._roster.optimizers if self._is_unscaled(optimizer)]

    def _unscaled_ids(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Parameters whose gradients do not carry the scale any more, as far as they concern ``optimizers``.

        Syncs host: only if an optimizer that was stepped since the last loss shares a parameter with one of these.
        """
        return self._roster.ids(self._unscaled()) | self._carried.unscaled_ids(optimizers)

    def _found(self, optimizer: Optimizer) -> Found:
        state = self._per_optimizer_states[id(optimizer)]
        return Found(state["found_inf_per_device"], state.get("amax_bits", {}))

    def _carried_scale(self) -> Tensor:
        return self._carried.value(self._state().scale)

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        assert self._scale is not None
        scale = self._carried.for_loss(self._scale)
        if not is_dry_run():
            bits = loss_bits(loss).to(scale.device, non_blocking=True)
            self._loss_bits = bits if self._loss_bits is None else torch.maximum(self._loss_bits, bits)
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        return wide * scale.to(loss.device, non_blocking=True)

    def _begin_step(self) -> None:
        """Forgets what belongs to the step that has ended."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._loss_bits = None
        self._carried.begin_step()
