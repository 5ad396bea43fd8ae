"""Transformer Engine's delayed scaling: its amax values travel in the exchange of the step.

By itself it reduces them twice in each micro-batch, over a group that all ranks must enter alike, and lets each
micro-batch into the history. See Transformer Engine's ``pytorch/quantization.py``, ``FP8GlobalStateManager``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distscale.errors import ConfigError
from distscale.fp8.keeper import Fp8Scales, Seen
from distscale.fp8.meter import Metered
from distscale.fp8.recipe import DelayedScaling

__all__ = ["serve_transformer_engine"]

_NUM_PRODUCTS = 3
"""As many as any module of Transformer Engine has, but for those that say how many. An unused place costs 4 bytes."""
_PARTS = (("scaling_fwd", 3, False), ("scaling_bwd", 2, True))
"""Name in ``fp8_meta``, tensors of one matrix product, whether they are gradients."""
_ABSOLUTE = 0x7FFFFFFF


def serve_transformer_engine(model: nn.Module, recipe: DelayedScaling) -> Fp8Scales:
    """Takes over the scales of all Transformer Engine modules of a model that use its delayed scaling.

    ::

        scales = serve_transformer_engine(model, DelayedScaling(amax_history_len=16))
        scaler = DistributedGradScaler(names=model, fp8=scales)
        ...
        with te.autocast(recipe=te.recipe.DelayedScaling(fp8_format=te.recipe.Format.HYBRID)):

    From then on Transformer Engine neither reduces nor updates anything in this process; ranks need not run the same
    modules. What its modules see in training mode counts, in passes without gradients too, as its checkpoints begin
    with one. Its kernels cannot scale by a tensor's own amax: a module begins with scale 1 on a rank that has not run
    it before. NaN is lost in its kernels before it comes here; the sweep sees it in the gradients.

    Args:
        model: before or after it is wrapped; the same names on all ranks. Fusible operations, ``te.ops``, are left out.
        recipe: its format must be that of Transformer Engine's recipe, the rest of which has no effect.

    Returns:
        What the scaler wants as ``fp8``.

    Raises:
        ConfigError: if Transformer Engine 2 is not installed, or the model has no module of it; later, if its recipe is
            of another format.
    """
    if not isinstance(recipe, DelayedScaling):
        raise ConfigError(f"{recipe!r} is not allowed: Transformer Engine is served with DelayedScaling(...)")
    scales = _EngineScales(recipe)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "fp8_meta", None), dict):
            scales.serve(name or "module", module)
    if not scales.tensors:
        raise ConfigError(f"this {type(model).__name__} has no module of Transformer Engine that could be served")
    _manager().reduce_and_update_fp8_tensors = staticmethod(_nothing)
    return scales


def _manager() -> Any:
    for name in ("quantization", "fp8"):  # older versions have the second
        try:
            return importlib.import_module(f"transformer_engine.pytorch.{name}").FP8GlobalStateManager
        except ImportError:
            continue
    raise ConfigError("Transformer Engine is not installed: pip install transformer_engine[pytorch]")


def _nothing(forward: bool = True) -> None:
    """In place of the reduction and update at the end of a forward and a backward pass."""


class _EngineScales(Fp8Scales):
    """Scales that live in the buffers of Transformer Engine's modules."""

    def __init__(self, recipe: DelayedScaling) -> None:
        super().__init__(recipe)
        self._served: list[_Served] = []

    def serve(self, name: str, module: nn.Module) -> None:
        served = _Served(name, module, self)
        self._served.append(served)
        module.register_forward_hook(served.after_forward)

    def collect(self, device: torch.device) -> Seen:
        for served in self._served:
            served.take(counts=True)
        return super().collect(device)

    def hand_out(self, loss_scale: Tensor) -> None:
        super().hand_out(loss_scale)
        for served in self._served:
            served.give()


class _Served:
    """One module, whose buffers come into being at its first forward pass."""

    def __init__(self, name: str, module: nn.Module, scales: Fp8Scales) -> None:
        num_products = max(_NUM_PRODUCTS, getattr(module, "num_gemms", 0))
        self._name, self._recipe = name, scales.recipe
        self._module: Any = module
        self._places: dict[str, range] = {}
        tensors: list[Metered] = []
        for part, num_each, is_gradient in _PARTS:
            self._places[part] = range(len(tensors), len(tensors) + num_each * num_products)
            tensors += [Metered(f"{name}.{part}.{index}", is_gradient) for index in range(num_each * num_products)]
        self._meter = scales.meter(tensors)

    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """Takes it at once, as long as it is known whether it counts."""
        self.take(counts=module.training)

    def take(self, counts: bool) -> None:
        """Moves what the module has seen since the last time into the meter; or nowhere. Syncs host: no."""
        for state, places in self._states():
            staged = state.amax_history[0]
            if counts:
                amax = self._meter.amax[places]
                amax.copy_(torch.maximum(amax, staged.view(torch.int32) & _ABSOLUTE))
            staged.zero_()

    def give(self) -> None:
        """Writes the scales that are known into the module's buffers. Syncs host: no."""
        for state, places in self._states():
            scale = self._meter.scale[places]
            state.scale.copy_(torch.where(scale > 0, scale, state.scale))

    def _states(self) -> Iterator[tuple[Any, slice]]:
        for part, places in self._places.items():
            state: Any = self._module.fp8_meta.get(part)
            if getattr(state, "amax_history", None) is None:
                continue  # not run yet, or by another recipe of Transformer Engine
            if state.recipe.fp8_format.name != self._recipe.fp8_format:
                raise ConfigError(
                    f"{self._name} runs by Transformer Engine's format {state.recipe.fp8_format.name}, and is served "
                    f"for {self._recipe.fp8_format}: use the same"
                )
            num_tensors = len(state.scale)
            assert num_tensors <= len(places)
            self._meter.move(state.scale.device)
            yield state, slice(places.start, places.start + num_tensors)
