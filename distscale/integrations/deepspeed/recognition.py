"""Which surface an optimizer has, and how one is made to skip that has none that we know.

An optimizer is known by its class and by the names and signatures of what is used of it: a subclass, or one of a
release that has changed them, is not.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from distscale.integrations.deepspeed.surfaces import Surface
from distscale.integrations.deepspeed.unpartitioned import BF16, FP16
from distscale.integrations.deepspeed.zero import ZeRO3, ZeRO12

__all__ = ["can_skip", "poison", "surface_of"]

_KNOWN: dict[str, type[Surface]] = {
    "DeepSpeedZeroOptimizer": ZeRO12,
    "DeepSpeedZeroOptimizer_Stage3": ZeRO3,
    "BF16_Optimizer": BF16,
    "FP16_Optimizer": FP16,
    "FP16_UnfusedOptimizer": FP16,
}


def surface_of(optimizer: Any) -> Surface | str:
    """The surface of an optimizer, or what about it is not known."""
    kind = type(optimizer).__name__
    if kind not in _KNOWN:
        return f"a {kind}, which distscale does not know"
    surface = _KNOWN[kind]
    for name, arguments in surface.needs.items():
        method = getattr(optimizer, name, None)
        if method is None:
            return f"a {kind} without {name}()"
        parameters = inspect.signature(method).parameters.values()
        names = [parameter.name for parameter in parameters]
        takes_anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)  # it is decorated
        if not takes_anything and tuple(names[: len(arguments)]) != tuple(arguments):
            return f"a {kind} whose {name}() takes {', '.join(names) or 'nothing'}, not {', '.join(arguments)}"
    if getattr(optimizer, "use_muon", False) or "muon" in type(optimizer.optimizer).__name__.lower():
        return f"a {kind} with Muon, which changes the gradients between the check and the norm"
    if getattr(optimizer, "zenflow", False) or getattr(optimizer, "swap_optimizer", False):
        return f"a {kind} with ZenFlow or an optimizer swapped to NVMe"
    if getattr(optimizer, "partial_offload", 1.0) not in (0, 1.0) and getattr(optimizer, "offload_optimizer", False):
        return f"a {kind} that offloads a part of its optimizer"
    return surface(optimizer)


def can_skip(optimizer: Any) -> bool:
    """Whether DeepSpeed's own check looks at this optimizer's gradients. Without FP16, old releases do not always."""
    if hasattr(optimizer, "_get_norm_groups") and optimizer.dtype != torch.half:
        return hasattr(optimizer, "_loss_scale_update_and_overflow_cleanup")
    return hasattr(optimizer, "overflow")


def poison(optimizer: Any) -> bool:
    """Writes a NaN where DeepSpeed's own check looks, to make it skip. Returns whether there was such a place."""
    places: list[Any] = []
    for group in getattr(optimizer, "averaged_gradients", {}).values():
        places += [grad for grad in group or () if isinstance(grad, Tensor) and grad.numel()][:1]
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if isinstance(flat, Tensor) and flat.numel():
        places.append(flat)
    for name in ("fp16_groups", "bf16_groups"):
        for params in getattr(optimizer, name, ()):
            places += [param.grad for param in params if param.grad is not None and param.grad.numel()][:1]
    for grads in getattr(optimizer, "fp32_groups_gradients", ()):
        places += [grad for grad in grads if grad.numel()][:1]
    for place in places:
        place.detach().view(-1)[:1].fill_(math.nan)
    if getattr(optimizer, "cpu_offload", False) and hasattr(optimizer, "local_overflow"):
        optimizer.local_overflow = True
        return True
    if getattr(optimizer, "offload_optimizer", False) and getattr(optimizer, "norm_for_param_grads", None):
        for key in optimizer.norm_for_param_grads:
            optimizer.norm_for_param_grads[key] = torch.tensor(math.nan)
        return True
    return bool(places)
