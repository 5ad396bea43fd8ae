"""torch's all-gather, by the name that it has."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather"]


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers the ``input`` of each rank, one after the other, into ``output``. Collective: yes.

    torch 2.13 warns at each use of the older name, and torch before it has no other.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=group)
