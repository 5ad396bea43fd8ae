"""A rank with three FP8 tensors, driven by a scaler."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from distscale import DistributedGradScaler, LocalReducer
from distscale.fp8 import DelayedScaling, Fp8Scales
from distscale.fp8.meter import Metered
from distscale.fp8.scales import bits_of_amax

__all__ = ["Job"]


class Job:
    """One rank: a parameter whose gradient is set by hand, and an input, a weight and a gradient in FP8."""

    def __init__(
        self, recipe: Any = None, reducer: Any = None, names: tuple[str, ...] = ("layer",), **arguments: Any
    ) -> None:
        self.scales = Fp8Scales(recipe or DelayedScaling("HYBRID", amax_history_len=4))
        self.meter = self.scales.meter(
            [Metered(f"{name}.{what}", what == "grad") for name in names for what in ("input", "weight", "grad")]
        )
        self.param = nn.Parameter(torch.zeros(2))
        self.optimizer = SGD([self.param], lr=1.0)
        self.scaler = DistributedGradScaler(
            "cpu",
            **{"init_scale": 8.0, "growth_interval": 1000, **arguments},
            names={"layer.bias": self.param},
            fp8=self.scales,
            reducer=reducer or LocalReducer(),
        )

    def see(self, *amax: float) -> None:
        """One micro-batch, in which the tensors have these amax values, that of the gradient with the loss scale."""
        for index, value in enumerate(amax):
            self.meter.record(index, bits_of_amax(torch.tensor([value, 0.0])))

    def step(self, gradient: float = 1.0) -> Any:
        loss = self.scaler.scale(torch.tensor(1.0))
        self.param.grad = torch.full((2,), gradient) * loss
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.last_step

    @property
    def histories(self) -> dict[str, list[float]]:
        return json.loads(self.scales.state_dict()["amax_history"])  # type: ignore[no-any-return]

    @property
    def scale(self) -> list[float]:
        return self.meter.scale.tolist()
