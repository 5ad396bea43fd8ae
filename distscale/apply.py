"""Carrying a decision out: the gradients get their final values, the optimizer steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from distscale.decision import Decision
from distscale.roster import Roster
from distscale.shards import restore_fp8
from distscale.sweep import scale_

__all__ = ["Stepper", "may_rehearse", "params_of", "with_gradients"]


class _Warm(NamedTuple):
    """A fused optimizer that can step without being asked about: its state exists."""

    params: dict[int, Tensor]
    """By id; held, so that no other tensor gets the id."""
    num_states: int
    switches: tuple[bool, ...]


class Stepper:
    """Steps optimizers as a decision says, and knows which of them do not need the host to know it.

    Args:
        roster: has met the optimizers.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._warm: MutableMapping[Optimizer, _Warm] = WeakIdKeyDictionary()

    def steps_on_device(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer can be stepped without asking the host whether to.

        A fused optimizer that creates its state in a step that is skipped leaves what its kernel did not write: zeros
        in Adam, and uninitialized memory as the momentum of SGD. So the host is asked until all states exist. It is
        also asked for one that is watched, so that a skipped ``step`` is not called, and for one that shares a
        parameter, so that it is known whether the gradient is unscaled.
        """
        warm = self._warm.get(optimizer)
        return (
            takes_grad_scale(optimizer)
            and warm is not None
            and not is_watched(optimizer)
            and not self._roster.shares(optimizer)
            and with_gradients(optimizer).keys() <= warm.params.keys()
            and len(optimizer.state) >= warm.num_states
            and _switches(optimizer) == warm.switches
        )

    def step(
        self,
        optimizers: Sequence[Optimizer],
        decision: Decision,
        unscaled: Collection[int],
        is_unscaled: Callable[[Optimizer], bool],
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        """Unscales, clips and steps. Collective: no. Syncs host: no, if :meth:`steps_on_device` for all.

        Args:
            decision: not to skip, or not read yet.
            unscaled: parameters, by id, whose gradients do not carry the scale any more.
            is_unscaled: whether that holds for all of an optimizer.
            kwargs: of each ``optimizer.step``.

        Returns:
            What each ``optimizer.step`` has returned.
        """
        for optimizer in optimizers:
            restore_fp8(params_of(optimizer))
        on_device = [takes_grad_scale(optimizer) and not self._roster.shares(optimizer) for optimizer in optimizers]
        held = self._roster.held(
            optimizer for optimizer, is_its_work in zip(optimizers, on_device, strict=True) if not is_its_work
        )
        for are_unscaled in (False, True):
            values = [shard.values for key, (_, shard) in held.items() if (key in unscaled) is are_unscaled]
            unscale_and_clip(values, decision, are_unscaled)
        returned = []
        for optimizer, unscales in zip(optimizers, on_device, strict=True):
            if not takes_grad_scale(optimizer):
                returned.append(optimizer.step(**kwargs))
            else:
                returned.append(step_fused(optimizer, decision, is_unscaled(optimizer), not unscales, kwargs))
                params = self._warm[optimizer].params if optimizer in self._warm else {}
                params = params | with_gradients(optimizer)
                self._warm[optimizer] = _Warm(params, len(optimizer.state), _switches(optimizer))
        return returned

    def forget(self) -> None:
        """The state of the optimizers may be another one now."""
        self._warm.clear()


def takes_grad_scale(optimizer: Optimizer) -> bool:
    """Whether the optimizer unscales and skips on the device, by its ``grad_scale`` and ``found_inf`` (``fused=True``).

    Optimizers of torch's older contract, which take the scaler itself as an argument, are treated like any other; so
    are objects that hand all they do not know on to a fused optimizer, which would not find the two on itself.
    """
    mark = "_step_supports_amp_scaling"
    return (
        inspect.getattr_static(optimizer, mark, None) is not None
        and bool(getattr(optimizer, mark))
        and "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def is_watched(optimizer: Optimizer) -> bool:
    """Whether someone has put a function of its own in the place of ``optimizer.step``, to see whether it is called.

    Accelerate does, and takes a step that was not called for one that was skipped. The wrapper of torch's LR schedulers
    does not count: it only wants to know whether ``step`` was ever called.
    """
    step = getattr(optimizer, "__dict__", {}).get("step")
    return step is not None and not getattr(step, "_wrapped_by_lr_sched", False)


def may_rehearse(optimizer: Optimizer) -> bool:
    """Whether a step of ``optimizer`` may only be meant to create its state: it has none, and its learning rates are 0.

    ``torch.distributed.checkpoint`` does such a step, with gradients of zeros, before it saves or loads an optimizer
    without state; Accelerate's optimizers lead it through the scaler. Syncs host: no; a rate on a GPU is not looked at.
    """
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    are_on_host = (not isinstance(rate, Tensor) or rate.device.type == "cpu" for rate in rates)
    return not getattr(optimizer, "state", None) and all(are_on_host) and not any(rates)


def with_gradients(optimizer: Optimizer) -> dict[int, Tensor]:
    """The parameters of ``optimizer`` that have a gradient, by id."""
    params = params_of(optimizer)
    return {id(param): param for param in params if param.grad is not None or hasattr(param, "fp8_grad")}


def params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All parameters of ``optimizer``."""
    return (param for group in optimizer.param_groups for param in group["params"])


def _switches(optimizer: Optimizer) -> tuple[bool, ...]:
    """What of the settings is on: a momentum, for instance, that is turned on later, creates a state then."""
    settings = (value for group in optimizer.param_groups for key, value in group.items() if key != "params")
    return tuple(bool(value) for value in settings if isinstance(value, bool | int | float))


def unscale_and_clip(values: Sequence[Tensor], decision: Decision, is_unscaled: bool) -> None:
    """Multiplies gradients by ``1 / scale x clip coefficient``, once, unless that is 1. Syncs host: no, if it was read.

    Args:
        values: local shards, any mix of dtypes and devices.
        is_unscaled: whether they do not carry the scale any more, so that only clipping is left.
    """
    clip = decision.verdict.clip_coef
    if values and decision.clip_coef != (1.0 if is_unscaled else decision.scale):
        inv_scale = decision.loss_scale.double().reciprocal().to(clip.device)
        scale_(values, (clip if is_unscaled else clip * inv_scale).float())


def step_fused(
    optimizer: Optimizer, decision: Decision, is_unscaled: bool, is_clipped: bool, kwargs: Mapping[str, Any]
) -> Any:
    """Steps an optimizer that unscales, clips and skips in its own kernel. Syncs host: no.

    A ``grad_scale`` that the user has set on the optimizer is multiplied with, as in torch.

    Args:
        is_unscaled: whether the gradients do not carry the scale any more.
        is_clipped: whether they are clipped already; then they are unscaled too.
    """
    grad_scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if not is_clipped and (decision.has_norm or not is_unscaled):
        carried = 1.0 if is_unscaled else decision.loss_scale.double()
        divisor = carried / decision.verdict.clip_coef.to(decision.loss_scale.device)
        grad_scale = (divisor if grad_scale is None else divisor * grad_scale).float()
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
    optimizer.found_inf = decision.verdict.found_inf  # type: ignore[attr-defined]
    try:
        return optimizer.step(**kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
