"""The parameters, gradients and momenta of all ranks as numpy arrays, and SGD on them.

Numbers have the dtype that the tensors have. The programs use powers of two, so nearly all sums and products are exact;
where one is rounded, it is rounded once.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from calls import OptimizerSpec, TensorSpec

NUMPY_DTYPES: dict[str, np.dtype] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
_FLOAT32_MAX = float(np.finfo(np.float32).max)

Place = tuple[int, str]  # rank, tensor


class Holdings:
    """What the ranks hold, by rank and name."""

    def __init__(self) -> None:
        self.tensors: list[TensorSpec] = []
        self.params: dict[Place, np.ndarray] = {}
        self.momenta: dict[Place, np.ndarray | None] = {}
        self.grads: dict[Place, np.ndarray | None] = {}

    def create(self, spec: TensorSpec) -> None:
        self.tensors.append(spec)
        for rank, numel in enumerate(spec.numels):
            if numel is not None:
                self.params[rank, spec.name] = np.zeros(numel, NUMPY_DTYPES[spec.dtype])
                self.grads[rank, spec.name] = self.momenta[rank, spec.name] = None

    def spec(self, name: str) -> TensorSpec:
        return next(spec for spec in self.tensors if spec.name == name)

    def places(self, optimizer: int) -> list[Place]:
        """Where the optimizer has parameters."""
        return [place for place in self.params if self.spec(place[1]).optimizer == optimizer]

    def multiply(self, rank: int, optimizer: int, factor: np.float32) -> None:
        for place in self.places(optimizer):
            grad = self.grads[place]
            if grad is not None and place[0] == rank:
                self.grads[place] = times(grad, factor)

    def clear(self, optimizer: int, set_to_none: bool) -> None:
        for place in self.places(optimizer):
            grad = self.grads[place]
            self.grads[place] = None if set_to_none or grad is None else np.zeros_like(grad)

    def add(self, place: Place, values: tuple[float, ...], scale: np.float32) -> None:
        """A backward pass through the loss times ``scale``."""
        dtype = self.params[place].dtype
        new = (np.array(values, np.float32) * scale).astype(dtype)
        old = self.grads[place]
        self.grads[place] = new if old is None else (old + new).astype(dtype)

    def apply(self, optimizer: int, spec: OptimizerSpec, carried: float, clip_coef: float) -> None:
        """A step of SGD on gradients that carry the scale ``carried``."""
        for place in self.places(optimizer):
            grad = self.grads[place]
            if grad is None:
                continue
            dtype, wide = grad.dtype, _wide(grad)
            if spec.fused:
                # The kernel divides, and keeps what it has formed in fp32 to the end.
                change = grad.astype(wide) / wide(np.float32(carried / clip_coef))
            else:
                change = times(grad, np.float32(clip_coef / carried)).astype(wide)
            if spec.momentum:
                old = self.momenta[place]
                if old is not None:
                    change = wide(spec.momentum) * old.astype(wide) + change
                self.momenta[place] = change.astype(dtype)
                if not spec.fused:
                    change = change.astype(dtype).astype(wide)
            self.params[place] = (self.params[place].astype(wide) - wide(spec.lr) * change).astype(dtype)


def look(grad: np.ndarray, inv_scale: float) -> tuple[str | None, float]:
    """Whether there is an inf or NaN in ``grad``, before or after unscaling, and its unscaled amax."""
    if grad.size == 0:
        return None, 0.0
    wide = np.abs(grad.astype(np.float64))
    if np.isnan(wide).any():
        return "nan", math.nan
    highest = float(wide.max())
    if math.isinf(highest):
        return "inf", math.inf
    unscaled = min(highest, _FLOAT32_MAX) * inv_scale
    largest = math.inf if grad.dtype == np.float64 else float(ml_dtypes.finfo(grad.dtype).max)
    return ("inf", math.inf) if unscaled > largest else (None, float(np.float32(min(unscaled, _FLOAT32_MAX))))


def _wide(values: np.ndarray) -> type[np.floating]:
    return np.float64 if values.dtype == np.float64 else np.float32


def times(grad: np.ndarray, factor: np.float32) -> np.ndarray:
    wide = _wide(grad)
    return (grad.astype(wide) * wide(factor)).astype(grad.dtype)
