"""Where DeepSpeed's optimizers keep the gradients that they are about to step on, and where they ask whether to.

A surface is one kind of optimizer that we know. Nothing in DeepSpeed is changed but attributes of the one optimizer:
its check and its norm are answered by ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

__all__ = ["Answer", "Gradient", "Surface", "counts"]


class Gradient(NamedTuple):
    """This rank's part of one gradient."""

    param: Tensor
    """The parameter of the model that it belongs to."""
    values: Tensor
    """Dense, any floating dtype, shape and device; it still carries the loss scale."""
    weight: float
    """In the norm: over all ranks, weighted parts add up to one full gradient."""


class Answer(NamedTuple):
    """What an optimizer is told about the step at hand."""

    skip: bool
    scaled_norm: Tensor
    """0-dim, on the CPU: the global norm of the gradients times the scale that they carry; inf in a skipped step."""


class Surface(ABC):
    """One kind of optimizer.

    Args:
        optimizer: of that kind.
    """

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """What must be there: methods with the names of their first arguments, without ``self``."""
    groups: ClassVar[str]
    """Attribute with the parameters of the model that this rank trains, a list a group."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @abstractmethod
    def gradients(self) -> Iterator[Gradient]:
        """All that this rank holds of the step's gradients, put right where DeepSpeed left those of an earlier one.

        Collective: no. Syncs host: no.
        """

    @abstractmethod
    def install(self, answer: Callable[[], Answer]) -> None:
        """Lets the optimizer ask ``answer`` in place of its own check and norm, as often as it likes in one step."""

    def clean_up(self, is_skipped: bool) -> None:  # noqa: B027 - most have nothing to do
        """Called after each step: empties buffers that outlive it."""


def counts(optimizer: Any, param: Any) -> float:
    """DeepSpeed's rule: of what model-parallel ranks or stages have in common, one of them counts."""
    if getattr(param, "ds_pipe_replicated", False):
        return 0.0
    is_split = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
    is_expert = not getattr(param, "allreduce", True)
    if not (is_split or is_expert):
        from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

        rank = getattr(optimizer, "model_parallel_rank", None)
        if (bwc_tensor_model_parallel_rank(getattr(optimizer, "mpu", None)) if rank is None else rank) > 0:
            return 0.0
    return 1.0
