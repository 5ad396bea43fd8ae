"""Tensors in pieces of a bounded size, so that the temporaries of the reference do not grow with the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["chunks_of", "scratch_for"]

# On the CPU a chunk fits the cache.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24


def scratch_for(shards: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One chunk to work in, for all shards in turn; fresh ones would leave a gradient's size of pieces in the heap."""
    device = shards[0].device
    numel = max(shard.numel() for shard in shards)
    return torch.empty(min(numel, _chunk_size(device)), dtype=dtype, device=device)


def _chunk_size(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def chunks_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape in views of at most a chunk; in the storage order of the first, flat if strides allow it."""
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    tensors = tuple(tensor.detach().permute(order) for tensor in tensors)
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    numel, size = tensors[0].numel(), _chunk_size(tensors[0].device)
    if numel <= size:
        if numel:
            yield tensors
    elif (row := numel // len(tensors[0])) <= size:
        yield from zip(*(torch.split(tensor, size // row) for tensor in tensors), strict=True)
    else:
        for rows in zip(*(tensor.unbind() for tensor in tensors), strict=True):
            yield from chunks_of(*rows)
