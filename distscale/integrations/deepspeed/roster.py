"""The coordinator's view of a DeepSpeed engine: its tensors by name, and where the step's gradients are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distscale.integrations.deepspeed.surfaces import Surface
from distscale.replicas import Look
from distscale.roster import Roster
from distscale.sweep import Part
from distscale.table import SlotTable

__all__ = ["EngineRoster"]


class EngineRoster(Roster):
    """Names all parameters of a module; its gradients are where the surface of the optimizer says.

    DeepSpeed's partitions know what they are a part of, so nothing is compared to tell replicas apart, and every
    gradient comes with its weight.

    Args:
        module: of the engine.
        surface: of its optimizer; None: the gradients are out of sight.
    """

    def __init__(self, module: nn.Module, surface: Surface | None) -> None:
        super().__init__()
        self._surface = surface
        self._name_of: dict[int, str] = {}
        if surface is not None:
            named = {id(param): name for name, param in module.named_parameters()}
            groups = getattr(surface.optimizer, surface.groups)
            # The optimizer may hold parameters that the module does not.
            for index, group in enumerate(groups):
                for place, param in enumerate(group):
                    self._name_of[id(param)] = named.get(id(param), f"group{index}.param{place}")
        self._looks_by_name = {name: Look(None, 0) for name in self._name_of.values()}
        self._is_listed = False

    @property
    def optimizers(self) -> list[Optimizer]:
        return []

    def meet(self, optimizers: Iterable[Any]) -> bool:
        return self._is_listed

    def look(self, world_size: int, unscaled: Collection[int], scale: float) -> dict[str, Look]:
        return dict(self._looks_by_name)

    def mark_listed(self) -> None:
        self._is_listed = True

    def parts(self, optimizers: Iterable[Any], table: SlotTable, unscaled: Collection[int]) -> list[Part]:
        """What is to be swept: all that the surface has. Collective: no. Syncs host: no."""
        gradients = () if self._surface is None else self._surface.gradients()
        return [
            Part(values.detach(), table.slots[self._name_of[id(param)]], weight, True)
            for param, values, weight in gradients
            if values.numel()
        ]
