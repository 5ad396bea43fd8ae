"""What a scaler holds from step to step, under torch's names, and its way into a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from distscale import checkpoint
from distscale.errors import ConfigError
from distscale.policy import DynamicScale, Policy, ScaleState

__all__ = ["ScaleKeeper"]


class ScaleKeeper(GradScaler):
    """The scale and its trackers, and the policy that moves them.

    The tensors are created on the device of the first loss, as in torch; before that the numbers they begin with are
    kept in ``_init_*``. They are changed in place only.
    """

    def __init__(self, device: str, policy: Policy, enabled: bool) -> None:
        rule = policy if isinstance(policy, DynamicScale) else DynamicScale()
        super().__init__(
            device, policy.init_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval, enabled
        )
        self._policy = policy
        self._init_hysteresis_tracker = policy.hysteresis
        self._init_blocked_steps = 0
        self._hysteresis_tracker: Tensor | None = None
        self._blocked_steps: Tensor | None = None
        self._step = 0

    def set_growth_factor(self, new_factor: float) -> None:
        """As in torch, and checked at once; must be done on all ranks."""
        self._change_rule(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As in torch, and checked at once; must be done on all ranks."""
        self._change_rule(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As in torch, and checked at once; must be done on all ranks."""
        self._change_rule(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Everything a restart needs, as plain numbers and strings; torch's GradScaler can load it too.

        To be taken after ``update()``. Empty if disabled. Collective: no, it is equal on all ranks. Syncs host: yes.
        """
        if not self._enabled:
            return {}
        return checkpoint.encode(self._policy, self.saved_state())

    def saved_state(self) -> checkpoint.SavedState:
        """The numbers of :meth:`state_dict` without the rule. Collective: no. Syncs host: yes."""
        growth, hysteresis, blocked = (
            (self._init_growth_tracker, self._init_hysteresis_tracker, self._init_blocked_steps)
            if self._scale is None
            else (int(tracker) for tracker in self._state()[1:])
        )
        return checkpoint.SavedState(self.get_scale(), growth, hysteresis, blocked, self._step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state of this class or of torch's GradScaler, on any number of ranks; all load the same.

        Collective: no. Syncs host: no.

        Raises:
            ConfigError: if the state cannot be used; nothing is changed then.
        """
        if not self._enabled:
            return
        self._policy, saved = checkpoint.decode(self._policy, state_dict)
        self._show_rule()
        self._init_scale = saved.scale
        self._init_growth_tracker = saved.growth_tracker
        self._init_hysteresis_tracker = saved.hysteresis_tracker
        self._init_blocked_steps = saved.blocked_steps
        self._step = saved.step
        if self._scale is not None:
            values = (saved.scale, saved.growth_tracker, saved.hysteresis_tracker, saved.blocked_steps)
            for mine, value in zip(self._state(), values, strict=True):
                mine.fill_(value)

    def _state(self) -> ScaleState:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None and self._growth_tracker is not None
        assert self._hysteresis_tracker is not None and self._blocked_steps is not None
        return ScaleState(self._scale, self._growth_tracker, self._hysteresis_tracker, self._blocked_steps)

    def _commit(self, state: ScaleState) -> None:
        for mine, new in zip(self._state(), state, strict=True):
            mine.copy_(new)
        self._step += 1

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._scale is not None:
            return  # Accelerate calls this after every load, also in a run that has begun, where torch's asserts
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.full((), self._init_hysteresis_tracker, dtype=torch.int32, device=dev)
        self._blocked_steps = torch.full((), self._init_blocked_steps, dtype=torch.int32, device=dev)

    def _change_rule(self, **changes: Any) -> None:
        if not isinstance(self._policy, DynamicScale):
            raise ConfigError(f"{', '.join(changes)} has no meaning with policy {self._policy.name!r}")
        self._policy = replace(self._policy, **changes)
        self._show_rule()

    def _show_rule(self) -> None:
        """Keeps torch's attributes, which its getters and other libraries read, equal to the policy's."""
        if isinstance(self._policy, DynamicScale):
            self._growth_factor = self._policy.growth_factor
            self._backoff_factor = self._policy.backoff_factor
            self._growth_interval = self._policy.growth_interval

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            saved = self.state_dict()
            state |= {f"_init_{key}": saved[key] for key in ("hysteresis_tracker", "blocked_steps")}
        return {**state, "_hysteresis_tracker": None, "_blocked_steps": None}
