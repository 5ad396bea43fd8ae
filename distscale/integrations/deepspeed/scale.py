"""Who owns the loss scale of a DeepSpeed engine: DeepSpeed's own scaler is laid to rest, and ours is put in force.

For checkpoints it comes back: what is saved is DeepSpeed's scaler in the state that ours has, so that DeepSpeed alone
can go on with it, and what DeepSpeed alone has saved is read from its scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from distscale.checkpoint import SavedState
from distscale.errors import ConfigError
from distscale.policy import DynamicScale, Policy

__all__ = ["ScaleOwner", "saved_by_deepspeed", "scale_owner"]


class ScaleOwner(Protocol):
    """The scale of one kind of optimizer."""

    uses_fp16: bool

    def take_over(self) -> Any:
        """Replaces DeepSpeed's scaler by one that never changes.

        Returns:
            The one that was there, if it was dynamic: as DeepSpeed's loading of a checkpoint has left it.
        """

    def set(self, scale: float) -> None:
        """Puts ``scale`` in force for the next backward passes and the step after them."""

    def watch(self, note: Callable[[Tensor], None]) -> None:
        """Calls ``note`` with every loss before its backward pass."""

    def lend(self, policy: Policy, state: SavedState) -> Any:
        """A context in which DeepSpeed's own scaler is there, in the given state."""


def scale_owner(engine: Any) -> ScaleOwner:
    """Finds out how the loss is scaled.

    Raises:
        ConfigError: if it is scaled in a way that cannot be right, or there is nothing to coordinate.
    """
    optimizer = engine.optimizer
    if any(
        getattr(place, name, None) is not None
        for place, name in ((optimizer, "torch_autocast_gradscaler"), (engine, "torch_autocast_z0_gradscaler"))
    ):
        raise ConfigError(
            '"torch_autocast" with float16 scales the loss by a torch GradScaler that DeepSpeed never updates after an '
            'overflow, and clips gradients that still carry the scale; use the "fp16" block, with "auto_cast" to cast '
            'the inputs, or "torch_autocast" with bfloat16'
        )
    if optimizer is None or not hasattr(optimizer, "optimizer"):
        raise ConfigError(
            "this engine hands gradients to its optimizer as they are (ZeRO stage 0 without fp16 or bf16), so there is "
            'nothing to coordinate: switch on "fp16", "bf16" or ZeRO, or use distscale.DistributedGradScaler'
        )
    if not engine.fp16_enabled():
        return _NoScale(engine)
    if not hasattr(optimizer, "loss_scaler"):
        if hasattr(type(engine), "train_batch"):
            raise ConfigError(
                "the pipeline engine with fp16 at ZeRO stage 0 never scales the loss, though it divides the gradients "
                'by the scale; set "zero_optimization": {"stage": 1}'
            )
        return _Stage0(engine)
    return _ZeRO(engine)


@dataclass
class _NoScale:
    """BF16 and FP32."""

    engine: Any
    uses_fp16 = False

    def take_over(self) -> Any:
        # Before 0.18.6 the optimizers of stage 0 have a scale in BF16 too, and use it in one place only.
        optimizer = self.engine.optimizer
        scale = _scale_of_stage_0(optimizer)
        if not hasattr(optimizer, "loss_scaler") and hasattr(scale, "dynamic_loss_scale"):
            scale.dynamic_loss_scale, scale.cur_scale = False, 1.0
        return None

    def set(self, scale: float) -> None:
        assert scale == 1

    def watch(self, note: Callable[[Tensor], None]) -> None:
        if hasattr(self.engine.optimizer, "scale_if_loss"):
            _watch(self.engine.optimizer, "scale_if_loss", note)
        else:
            _watch(self.engine, "backward", note)

    @contextmanager
    def lend(self, policy: Policy, state: SavedState) -> Iterator[None]:
        yield


@dataclass
class _ZeRO:
    """ZeRO stages 1, 2 and 3, whose loss and gradients both follow ``override_loss_scale``."""

    engine: Any
    uses_fp16 = True

    def take_over(self) -> Any:
        from deepspeed.runtime.fp16.loss_scaler import LossScaler

        optimizer = self.engine.optimizer
        found = optimizer.loss_scaler
        optimizer.loss_scaler = LossScaler(scale=found.cur_scale)
        optimizer.dynamic_loss_scale = False
        return found if found.dynamic else None

    def set(self, scale: float) -> None:
        optimizer = self.engine.optimizer
        optimizer.external_loss_scale = scale  # beforehand: the method logs a line at every change
        optimizer.override_loss_scale(scale)

    def watch(self, note: Callable[[Tensor], None]) -> None:
        optimizer = self.engine.optimizer
        _watch(optimizer, "scale_if_loss" if hasattr(optimizer, "scale_if_loss") else "backward", note)

    @contextmanager
    def lend(self, policy: Policy, state: SavedState) -> Iterator[None]:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

        optimizer = self.engine.optimizer
        kept = optimizer.loss_scaler, optimizer.dynamic_loss_scale
        if isinstance(policy, DynamicScale):
            lent = DynamicLossScaler(
                init_scale=state.scale,
                scale_window=policy.growth_interval,
                min_scale=policy.min_scale,
                delayed_shift=policy.hysteresis,
                consecutive_hysteresis=policy.hysteresis_refill is not None,
            )
            lent.cur_hysteresis = max(state.hysteresis_tracker, 1)
            lent.cur_iter, lent.last_overflow_iter = state.growth_tracker, -1
            optimizer.loss_scaler, optimizer.dynamic_loss_scale = lent, True
        else:
            optimizer.loss_scaler = LossScaler(scale=state.scale)
        try:
            yield
        finally:
            optimizer.loss_scaler, optimizer.dynamic_loss_scale = kept


@dataclass
class _Stage0:
    """Stage 0 in FP16, where the engine divides by a scale that, since 0.18.3, it does not multiply the loss with."""

    engine: Any
    uses_fp16 = True

    @property
    def scale(self) -> Any:
        return _scale_of_stage_0(self.engine.optimizer)

    def take_over(self) -> Any:
        scale = self.scale
        was_dynamic, scale.dynamic_loss_scale = scale.dynamic_loss_scale, False
        return _Found(scale.cur_scale, scale.cur_iter, scale.last_overflow_iter) if was_dynamic else None

    def set(self, scale: float) -> None:
        self.scale.cur_scale = scale

    def watch(self, note: Callable[[Tensor], None]) -> None:
        engine = self.engine
        backward, scale = engine.backward, engine.scale if hasattr(type(engine), "scale") else None
        scales_itself = hasattr(type(engine), "_do_optimizer_backward")  # until 0.18.2

        def watched_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            note(loss.detach())
            if scales_itself:
                return backward(loss, *args, **kwargs)
            factor = self.scale.cur_scale
            returned = backward(loss.float() * factor, *args, **kwargs)
            return None if returned is None else (returned / factor).to(loss.dtype)

        def watched_scale(loss: Tensor) -> Any:
            assert scale is not None
            note(loss.detach())
            return scale(loss.float() * self.scale.cur_scale)

        engine.backward = watched_backward
        if scale is not None:
            engine.scale = watched_scale

    @contextmanager
    def lend(self, policy: Policy, state: SavedState) -> Iterator[None]:
        lent: dict[str, float] = {"cur_iter": state.growth_tracker, "last_overflow_iter": -1}
        if isinstance(policy, DynamicScale):
            lent |= {"dynamic_loss_scale": True, "scale_factor": policy.growth_factor}
            lent |= {"scale_window": policy.growth_interval, "min_loss_scale": policy.min_scale}
        scale = self.scale
        kept = {key: getattr(scale, key, None) for key in lent}
        vars(scale).update(lent)
        try:
            yield
        finally:
            vars(scale).update(kept)


def _scale_of_stage_0(optimizer: Any) -> Any:
    """Where the optimizers of stage 0 keep their scale: until 0.18.2 in themselves."""
    return getattr(optimizer, "loss_scale_config", optimizer)


@dataclass
class _Found:
    """What stage 0 keeps of a dynamic scale, under the names of DeepSpeed's scaler."""

    cur_scale: float
    cur_iter: int
    last_overflow_iter: int


def saved_by_deepspeed(found: Any, policy: DynamicScale, step: int) -> SavedState:
    """Our state for the dynamic scaler that a checkpoint of DeepSpeed alone has brought.

    DeepSpeed grows after window + 1 clean steps and then after each window; our tracker counts from the last growth.
    """
    clean = max(0, found.cur_iter - found.last_overflow_iter - 1)
    run = clean if clean <= policy.growth_interval else (clean - 1) % policy.growth_interval + 1
    tolerance = min(getattr(found, "cur_hysteresis", policy.hysteresis), policy.hysteresis)
    return SavedState(float(found.cur_scale), run, tolerance, 0, step)


def _watch(where: Any, name: str, note: Callable[[Tensor], None]) -> None:
    original = getattr(where, name)

    def watched(loss: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            note(loss.detach())
        return original(loss, *args, **kwargs)

    setattr(where, name, watched)
