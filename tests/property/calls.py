"""The calls that a program makes, and the world in which it makes them. No torch in here.

The same calls are played by threads, by processes and by the oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_RANKS = 4
DTYPES = ("fp16", "bf16", "fp32", "fp64")


@dataclass(frozen=True)
class TensorSpec:
    """One parameter name; its ranks may hold different numbers of elements, none, or no such tensor at all."""

    name: str
    optimizer: int
    dtype: str
    numels: tuple[int | None, ...]
    """By rank; None where the rank lacks it. At most 7: torch 2.13's fused SGD leaves fp16 vectors of 16 untouched."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An SGD whose arithmetic is exact: ``lr`` and ``momentum`` are powers of two."""

    fused: bool
    momentum: float = 0.0
    lr: float = 1.0


@dataclass(frozen=True)
class World:
    """What is fixed for a program."""

    optimizers: tuple[OptimizerSpec, ...]
    tensors: tuple[TensorSpec, ...]
    policy: str = "dynamic"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 3
    hysteresis: int = 1
    min_scale: float = 2.0**-6
    max_scale: float = 2.0**40
    max_norm: float | None = None
    max_consecutive_skips: int | None = None
    silent: tuple[int, ...] = ()
    """Ranks that never scale a loss: stages of a pipeline before the last, whose gradients come from the last one's."""

    def scaler_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the scaler."""
        return {
            "init_scale": self.init_scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "hysteresis": self.hysteresis,
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "max_norm": self.max_norm,
            "policy": self.policy,
            "max_consecutive_skips": self.max_consecutive_skips,
        }


@dataclass(frozen=True)
class Backward:
    """A scaled loss on every rank, and its backward pass."""

    grads: Mapping[tuple[int, str], tuple[float, ...]] = field(hash=False)
    """By rank and tensor: what the gradient of the unscaled loss is; no entry where the loss does not reach."""
    loss: tuple[float, ...] = (0.0,) * NUM_RANKS
    """By rank: the value of the loss."""
    loss_dtype: str = "fp32"
    idle: tuple[int, ...] = ()
    """Ranks that have no loss this time, and no gradient either."""


@dataclass(frozen=True)
class Unscale:
    optimizer: int


@dataclass(frozen=True)
class Step:
    optimizers: tuple[int, ...]
    reads: bool = True
    """Whether the caller looks at ``last_step`` right after it."""
    set_to_none: bool = True
    """How the gradients are cleared after it."""


@dataclass(frozen=True)
class Update:
    new_scale: float | None = None
    as_tensor: bool = False


@dataclass(frozen=True)
class Veto:
    rank: int


@dataclass(frozen=True)
class Stop:
    rank: int


@dataclass(frozen=True)
class SetGrowthInterval:
    interval: int


@dataclass(frozen=True)
class Restart:
    """A new scaler from the saved state, with optimizers that live on."""

    torch_format: bool
    """Only the five keys that torch's GradScaler saves."""


@dataclass(frozen=True)
class AddGroup:
    tensor: TensorSpec


Op = Backward | Unscale | Step | Update | Veto | Stop | SetGrowthInterval | Restart | AddGroup
