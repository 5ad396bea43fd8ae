"""What users pass in: the policy by name, optimizers, losses. Checks that fail before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distscale.errors import ConfigError, ProtocolError
from distscale.policy import DynamicScale, NoScaling, Policy, StaticScale, is_number, scale_bounds

__all__ = ["check_max_norm", "check_step", "make_policy", "map_tensors", "read_scale", "split_optimizers"]


def make_policy(policy: Policy | str | None, rule: DynamicScale) -> Policy:
    """The policy that the constructor's arguments mean; ``rule`` holds those of dynamic scaling."""
    if policy is None or policy == DynamicScale.name:
        return rule
    if policy == StaticScale.name:
        return StaticScale(rule.init_scale)
    if policy == NoScaling.name:
        return NoScaling()
    if isinstance(policy, str):
        raise ConfigError(f"policy={policy!r} is unknown; it must be 'dynamic', 'static', 'none' or a policy object")
    given: object = policy
    if isinstance(given, type) or not is_dataclass(given) or not hasattr(given, "next_state"):
        raise ConfigError(f"policy={given!r} is neither a name nor a policy object, which is a frozen dataclass")
    if rule != DynamicScale():
        raise ConfigError(
            f"give a policy object or {', '.join(field.name for field in fields(rule))}, not both: the object brings "
            "its own"
        )
    return policy


def split_optimizers(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The optimizers that positional arguments begin with, and what follows them, without None."""
    is_optimizer = [hasattr(argument, "param_groups") and hasattr(argument, "step") for argument in arguments]
    num_optimizers = is_optimizer.index(False) if False in is_optimizer else len(arguments)
    return list(arguments[:num_optimizers]), [rest for rest in arguments[num_optimizers:] if rest is not None]


def check_step(optimizers: Sequence[Any], rest: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ProtocolError unless there is nothing but optimizers, each once, and no closure."""
    given = [*rest, kwargs.get("closure")]
    if any(callable(argument) and not isinstance(argument, nn.Module) for argument in given):
        raise ProtocolError(
            "step() got a closure: an optimizer that calls it would see gradients that were never checked or unscaled. "
            "Call backward() before step(), without a closure"
        )
    if rest:
        raise ProtocolError(
            f"step() takes optimizers, and got a {type(rest[0]).__name__}; pass the optimizers only, and further "
            "arguments of their own step() by keyword"
        )
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ProtocolError(
                f"{type(optimizer).__name__} cannot be stepped by a scaler: its step() needs a closure, and would see "
                "gradients in it that were never checked or unscaled"
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ProtocolError("step() got one optimizer twice; each steps once")


def map_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies ``function`` to a tensor or to each tensor of an iterable; lists and tuples keep their type."""
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Iterable):
        mapped = (map_tensors(output, function) for output in outputs)
        return type(outputs)(mapped) if isinstance(outputs, list | tuple) else mapped
    raise ConfigError(f"scale() takes a tensor or an iterable of tensors, and got a {type(outputs).__name__}")


def check_max_norm(max_norm: float | None) -> None:
    """Raises ConfigError unless ``max_norm`` is None or above 0; ``math.inf`` is allowed."""
    if max_norm is not None and not (is_number(max_norm) and max_norm > 0):
        raise ConfigError(f"max_norm={max_norm!r} is not allowed: it must be above 0, math.inf to measure, or None")


def read_scale(new_scale: float | Tensor, policy: Policy, like: Tensor) -> Tensor:
    """The argument of ``update`` as a tensor like ``like``, within the bounds of ``policy``.

    Syncs host: no; so a number outside the bounds is refused, and the value of a tensor is clamped to them;
    a NaN leaves the scale as it is.
    """
    low, high = scale_bounds(policy)
    if not isinstance(new_scale, Tensor):
        if not is_number(new_scale) or not low <= new_scale <= high:
            raise ConfigError(
                f"update(new_scale={new_scale!r}) is not allowed: with policy {policy.name!r} the scale must lie "
                f"between {low:g} and {high:g}"
            )
        return torch.full_like(like, new_scale)
    if new_scale.numel() != 1 or new_scale.requires_grad:
        raise ConfigError("update(new_scale) takes a number or a tensor of one element that requires no gradient")
    given = new_scale.detach().to(like).reshape(())
    return torch.where(given.isnan(), like, given.clamp(low, high))
