"""Where a module finds the scales of its FP8 tensors, and leaves what it sees of them until the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distscale.errors import ProtocolError

__all__ = ["Meter", "Metered", "join"]


@dataclass(frozen=True)
class Metered:
    """One tensor with a scale of its own."""

    name: str
    """Equal on all ranks that hold the tensor or a piece of it, and unique otherwise."""
    is_gradient: bool
    """It carries the loss scale, and says nothing on a step that was skipped."""
    is_sent: bool = False
    """It is the gradient of a parameter on its way to other ranks: inf or NaN in it make all ranks skip the step, and
    what is beyond its scale is counted."""


class Meter:
    """The scales of a few tensors of one device, and their amax values since the last step.

    A module owns it, reads ``scale`` and raises ``amax``; :class:`~distscale.fp8.Fp8Scales` does the rest at each step.
    A copy of it, as in a copied model, belongs to nobody: it keeps its scales.

    Args:
        tensors: what they are, in the order of the entries below.
    """

    def __init__(self, tensors: Sequence[Metered]) -> None:
        self.tensors = tuple(tensors)
        # Said explicitly, for a model may be made under torch.device("meta").
        self.scale = torch.zeros(len(self.tensors), device="cpu")
        """fp32, shape (num_tensors,): multiplies on quantizing; 0: unknown, the tensor's own amax is to be used."""
        self.amax = torch.zeros(len(self.tensors), dtype=torch.int32, device="cpu")
        """int32, shape (num_tensors,): amax bits, the maximum over everything since the last step."""
        self.num_saturated = torch.zeros(len(self.tensors), dtype=torch.int64, device="cpu")
        """int64, shape (num_tensors,): values beyond the scale since the last step, of tensors that are sent."""
        self.num_steps = 0
        """That ended: the same on all ranks, as is all that follows from it."""
        self.before_rounding: dict[int, Tensor] = {}
        """Amax bits of tensors that were gathered in FP8, as they were before: int32, shape ()."""

    def move(self, device: torch.device) -> None:
        """To where the tensors are."""
        if self.scale.device != device:
            # What is made in inference mode could not be written to in training.
            with torch.inference_mode(False):
                self.scale, self.amax = self.scale.to(device), self.amax.to(device)
                self.num_saturated = self.num_saturated.to(device)

    def record(self, index: int, bits: Tensor) -> None:
        """Raises an amax: int32 bits, shape (). Syncs host: no. Calling it twice for one tensor changes nothing."""
        bits = self.before_rounding.get(index, bits)
        self.amax[index].copy_(torch.maximum(self.amax[index], bits))

    def clear(self) -> None:
        """Begins the next step. Syncs host: no."""
        self.amax.zero_()
        self.num_saturated.zero_()
        self.num_steps += 1


def join(by_rank: Sequence[Sequence[Metered]]) -> tuple[Metered, ...]:
    """The tensors of all ranks, each once, those that are sent first: the same on every rank.

    Raises:
        ProtocolError: if ranks mean different things by one name.
    """
    found: dict[str, Metered] = {}
    for rank, tensors in enumerate(by_rank):
        for tensor in tensors:
            other = found.setdefault(tensor.name, tensor)
            if other != tensor:
                raise ProtocolError(
                    f"ranks mean different FP8 tensors by one name: {tensor} on rank {rank}, else {other}"
                )
    return tuple(sorted(found.values(), key=lambda tensor: not tensor.is_sent))
