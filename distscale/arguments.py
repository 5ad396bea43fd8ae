"""What users pass in: the policy by name, optimizers, losses. Checks that fail before anything is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distscale.errors import ConfigError, ProtocolError
from distscale.policy import DynamicScale, NoScaling, Policy, StaticScale

__all__ = ["check_optimizers", "make_policy", "map_tensors"]


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
    if rule != DynamicScale():
        raise ConfigError(
            "give a policy object or init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale "
            "and max_scale, not both: the object brings its own"
        )
    return policy


def check_optimizers(optimizers: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ProtocolError unless all positional arguments are optimizers and none is a closure."""
    closure = "closure" in kwargs and kwargs["closure"] is not None
    for optimizer in optimizers:
        if hasattr(optimizer, "param_groups") and hasattr(optimizer, "step"):
            continue
        if not callable(optimizer):
            raise ProtocolError(f"step() takes optimizers, and got a {type(optimizer).__name__}; pass the optimizers only")
        closure = True
    if closure:
        raise ProtocolError(
            "step() got a closure: an optimizer that calls it would see gradients that were never checked or unscaled. "
            "Call backward() before step(), without a closure"
        )


def map_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies ``function`` to a tensor or to each tensor of an iterable; lists and tuples keep their type."""
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Iterable):
        mapped = (map_tensors(output, function) for output in outputs)
        return type(outputs)(mapped) if isinstance(outputs, list | tuple) else mapped
    raise ConfigError(f"scale() takes a tensor or an iterable of tensors, and got a {type(outputs).__name__}")


def widened(loss: Tensor) -> Tensor:
    """The loss in at least fp32, so that its product with the scale cannot overflow where the loss did not."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))
