"""Which tensors of one name are copies of one gradient, and which only happen to be called alike.

A norm over all ranks counts a replicated gradient once. A DTensor says how it is laid out; a plain tensor does not: the
first layer's weight of every pipeline stage may be called ``0.weight``, as is every rank's copy of it under DDP. What
tells them apart are their values and their gradients. Those of copies are equal but for rounding. Other tensors may
begin with equal values, as norms, zeros and experts that were copied from one layer do, but get gradients of their own.

Ranks compare sketches: a few random projections, by which the distance of two tensors is known well enough to tell
rounding from another tensor (Johnson and Lindenstrauss 1984).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distscale.checksum import digest
from distscale.shards import is_dtensor

__all__ = ["Holders", "Look", "count_holders", "look"]

_MAX_SAMPLES = 1 << 16
_NUM_PROJECTIONS = 8
_TOLERANCE = 0.05
"""Distance of copies, relative to their norm: more than rounding in bf16, and far less than that of two gradients."""

Sketch = tuple[float, ...]
"""The largest magnitude, and, of the values divided by it, the norm and the projections."""
_NOTHING: Sketch = (0.0,) * (2 + _NUM_PROJECTIONS)


class Look(NamedTuple):
    """What one rank sees of one of its tensors; plain values, which travel between ranks."""

    mesh: int | None
    """Checksum of the ranks that hold the pieces of a DTensor; None for a plain tensor, whole on each of its ranks."""
    content: int
    """Checksum of shape and dtype; 0 if no other tensor can have the name, since the mesh has all ranks."""
    place: int = 0
    """Of this rank in the mesh."""
    values: Sketch | None = None
    """None if there is nothing to tell: no other tensor can have the name, there are no values or no gradient ever."""
    grad: Sketch | None = None
    """Of the gradient, unscaled; None if it is not there, zero, or not finite."""

    @property
    def is_whole(self) -> bool:
        """Whether no later look can tell more."""
        return self.values is None or self.grad is not None


class Holders(NamedTuple):
    """What there is to know of replicas, at a time."""

    by_rank: list[dict[str, int]]
    """For every rank and each of its tensors, how many ranks hold that gradient, as it is now, or a piece of it."""
    are_final: bool
    """False if some tensors count as copies by their values alone, for want of gradients."""


def look(named: Mapping[str, Tensor], world_size: int, unscaled: frozenset[int], scale: float) -> dict[str, Look]:
    """Looks at up to 65,536 values of each parameter and of its gradient, spread over it.

    Args:
        named: the parameters of this rank by name.
        world_size: number of ranks that share the decision.
        unscaled: parameters, by id, whose gradients do not carry the scale.
        scale: that the others carry.

    Collective: no. Syncs host: yes, once a device.
    """
    looks: dict[str, Look] = {}
    meshes = {id(param.device_mesh): param.device_mesh for param in named.values() if is_dtensor(param)}
    ranks = {key: digest(mesh.mesh.flatten().tolist()) for key, mesh in meshes.items()}
    on_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    places: list[tuple[str, torch.device]] = []
    for name, param in named.items():
        mesh = param.device_mesh if is_dtensor(param) else None
        if mesh is not None and mesh.size() == world_size:
            looks[name] = Look(ranks[id(mesh)], 0)
            continue
        values = _local(param)
        place = 0 if mesh is None else int((mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero())
        content = digest((tuple(values.shape), str(values.dtype)))
        looks[name] = Look(None if mesh is None else ranks[id(mesh)], content, place)
        if values.numel() and param.requires_grad:
            on_device[values.device] += [_sketch(values), _sketch_of_gradient(param).to(values.device)]
            places.append((name, values.device))
    sketches = {device: iter(torch.stack(of_device).tolist()) for device, of_device in on_device.items()}
    for name, device in places:
        values_sketch, grad = tuple(next(sketches[device])), next(sketches[device])
        grad[0] /= 1.0 if id(named[name]) in unscaled else scale
        is_there = 0.0 < grad[0] < float("inf")
        looks[name] = looks[name]._replace(values=values_sketch, grad=tuple(grad) if is_there else None)
    return looks


def count_holders(looks_by_rank: Sequence[Mapping[str, Look]]) -> Holders:
    """Finds the tensors that are copies of each other. Pure.

    Two are, if all that is known of their pieces, in the order of their meshes, is alike: shape and dtype, values, and
    gradients, where both are known.
    """
    pieces_of: dict[tuple[str, str, int], list[tuple[int, int, Look]]] = defaultdict(list)
    for rank, looks in enumerate(looks_by_rank):
        for name, seen in looks.items():
            key = (name, "mesh", seen.mesh) if seen.mesh is not None else (name, "rank", rank)
            pieces_of[key].append((seen.place, rank, seen))
    like: dict[tuple[str, tuple[int, ...]], list[list[tuple[int, Look]]]] = defaultdict(list)
    for (name, _, _), pieces in pieces_of.items():
        in_order = [(rank, seen) for _, rank, seen in sorted(pieces, key=itemgetter(0))]
        like[name, tuple(seen.content for _, seen in in_order)].append(in_order)
    by_rank: list[dict[str, int]] = [dict.fromkeys(looks, 0) for looks in looks_by_rank]
    are_final = True
    for (name, _), tensors in like.items():
        for copies in _copies([[seen for _, seen in tensor] for tensor in tensors]):
            held = [piece for index in copies for piece in tensors[index]]
            are_final &= len(copies) == 1 or all(seen.is_whole for _, seen in held)
            # What has no gradient adds nothing to a norm, to which what has one then adds all of it.
            told = [index for index in copies if all(seen.is_whole for _, seen in tensors[index])]
            for group in (held, [piece for index in told for piece in tensors[index]]):
                for rank, _ in group:
                    by_rank[rank][name] = len(group)
    return Holders(by_rank, are_final)


def _copies(tensors: Sequence[Sequence[Look]]) -> Iterator[list[int]]:
    """Groups tensors, given by their pieces, of which each has equally many."""
    values, grads = (
        np.array([[getattr(seen, field) or _NOTHING for seen in pieces] for pieces in tensors])
        for field in ("values", "grad")
    )
    lacks = np.array([[not seen.is_whole for seen in pieces] for pieces in tensors])
    left = np.argsort(lacks.any(axis=1), kind="stable")  # the first of a group tells most
    while len(left):
        first = left[0]
        are_alike = _are_alike(values[first], values[left]) & (
            _are_alike(grads[first], grads[left]) | lacks[first] | lacks[left]
        )
        chosen = are_alike.all(axis=1)
        chosen[0] = True  # whatever a NaN says
        yield left[chosen].tolist()
        left = left[~chosen]


def _are_alike(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether sketches are of tensors that differ by rounding only.

    Args:
        one: shape (pieces, 10).
        others: shape (tensors, pieces, 10).

    Returns:
        bool, shape (tensors, pieces).
    """
    highest = np.maximum(one[:, 0], others[..., 0])
    highest = np.where(highest > 0, highest, 1.0)
    one = one[:, 1:] * (one[:, 0] / highest)[..., None]
    others = others[..., 1:] * (others[..., 0] / highest)[..., None]
    distance = np.sqrt(np.square(one[..., 1:] - others[..., 1:]).mean(axis=-1))
    are_alike: np.ndarray = distance <= _TOLERANCE * np.maximum(one[..., 0], others[..., 0])
    return are_alike


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()


def _sketch_of_gradient(param: Tensor) -> Tensor:
    """Of zeros if it is not there, sparse, or still to be reduced."""
    grad = param.grad
    if grad is None or grad.is_sparse or (is_dtensor(grad) and any(place.is_partial() for place in grad.placements)):
        return torch.zeros(2 + _NUM_PROJECTIONS, dtype=torch.float64)
    return _sketch(_local(grad))


def _sketch(values: Tensor) -> Tensor:
    """float64, shape (10,), on the device of ``values``, of which there is at least one."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1)[:: -(-values.numel() // _MAX_SAMPLES)].double()
    highest = flat.abs().amax()
    flat = flat / torch.where(highest > 0, highest, 1.0)
    return torch.cat([highest[None], flat.norm()[None], _projections(flat.device)[:, : len(flat)] @ flat])


@lru_cache(maxsize=8)
def _projections(device: torch.device) -> Tensor:
    """float64, shape (8, 65536): the same on all ranks, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_PROJECTIONS, _MAX_SAMPLES)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(device)
