"""torch's collectives by the names that they have: 2.13 warns at the older ones, and torch before it has no others."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather", "reduce_scatter"]


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gathers the ``input`` of each rank, one after the other, into ``output``. Collective: yes."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sums ``input`` over the ranks, and gives each its part, as large as ``output``. Collective: yes."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, input, group=group)
