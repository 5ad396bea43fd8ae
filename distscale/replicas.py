"""Which tensors of one name are copies of one gradient, and which only happen to be called alike.

A norm over all ranks counts a replicated gradient once. A DTensor says how it is laid out; a plain tensor does not: the
first layer's weight of every pipeline stage may be called ``0.weight``, as is every rank's copy of it under DDP. What
tells them apart is their content, for copies that are stepped together are equal, bit for bit. Tensors of one constant
value, as biases and norms are at the start, say nothing; they take after a neighbour in their module, whose pieces on
all ranks count as one.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distscale.checksum import digest
from distscale.shards import is_dtensor

__all__ = ["Look", "count_holders", "look"]

_MAX_SAMPLES = 1 << 16
_SAME_WIDTH_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Look(NamedTuple):
    """What one rank sees of one of its tensors; plain values, which travel between ranks."""

    mesh: int | None
    """Checksum of the ranks that hold the pieces of a DTensor; None for a plain tensor, whole on each of its ranks."""
    content: int
    """Checksum of shape, dtype and values; 0 if no other tensor can have the name, since the mesh has all ranks."""
    neighbour: str | None = None
    """The tensor that a constant one takes after."""


def look(named: Mapping[str, Tensor], world_size: int) -> dict[str, Look]:
    """Looks at up to 65,536 values of each parameter, spread over it.

    Args:
        named: the parameters of this rank by name, in the order of the optimizers.
        world_size: number of ranks that share the decision.

    Collective: no. Syncs host: yes, once a device.
    """
    values = {name: param.to_local() if is_dtensor(param) else param for name, param in named.items()}
    on_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for local in values.values():
        on_device[local.device].append(_checksums(local.detach()))
    sums = {device: iter(torch.stack(of_device).tolist()) for device, of_device in on_device.items()}
    own: dict[str, int] = {}
    constant = []
    for name, local in values.items():
        *checksums, lowest, highest = next(sums[local.device])
        own[name] = digest((tuple(local.shape), str(local.dtype), checksums))
        if lowest == highest:
            constant.append(name)
    neighbours = _neighbours(list(named), constant)
    meshes = {id(param.device_mesh): param.device_mesh for param in named.values() if is_dtensor(param)}
    ranks = {key: digest(mesh.mesh.flatten().tolist()) for key, mesh in meshes.items()}
    looks = {}
    for name, param in named.items():
        mesh = param.device_mesh if is_dtensor(param) else None
        if mesh is not None and mesh.size() == world_size:
            looks[name] = Look(ranks[id(mesh)], 0)
        else:
            looks[name] = Look(None if mesh is None else ranks[id(mesh)], own[name], neighbours.get(name))
    return looks


def count_holders(looks_by_rank: Sequence[Mapping[str, Look]]) -> list[dict[str, int]]:
    """Counts, for every rank and each of its tensors, the ranks that hold that gradient or a piece of it. Pure."""
    # A DTensor is known by what all ranks of its mesh hold together, and constant if all pieces are.
    looks_at: dict[object, list[Look]] = defaultdict(list)
    for rank, looks in enumerate(looks_by_rank):
        for name, seen in looks.items():
            looks_at[_key(rank, name, seen)].append(seen)
    constant = {key for key, pieces in looks_at.items() if all(piece.neighbour is not None for piece in pieces)}
    identities: list[dict[str, object]] = [{} for _ in looks_by_rank]
    for of_constants in (False, True):
        pieces: dict[object, set[object]] = defaultdict(set)
        chosen = [
            (rank, name, key, (seen.content, identities[rank].get(seen.neighbour or "") if of_constants else None))
            for rank, looks in enumerate(looks_by_rank)
            for name, seen in looks.items()
            if ((key := _key(rank, name, seen)) in constant) is of_constants
        ]
        for _, _, key, piece in chosen:
            pieces[key].add(piece)
        for rank, name, key, _ in chosen:
            identities[rank][name] = name, frozenset(pieces[key])
    holders = Counter(identity for by_name in identities for identity in by_name.values())
    return [{name: holders[identities[rank][name]] for name in looks} for rank, looks in enumerate(looks_by_rank)]


def _key(rank: int, name: str, seen: Look) -> object:
    """Of all pieces of one tensor."""
    return (name, "mesh", seen.mesh) if seen.mesh is not None else (name, "rank", rank)


def _neighbours(names: Sequence[str], constant: Sequence[str]) -> dict[str, str]:
    """For each constant tensor one that is not: the last before it, else the first after it, in the smallest module
    around it that has any; none for a model that is constant throughout.
    """
    by_module: dict[str, list[int]] = defaultdict(list)  # places of the others
    without = set(constant)
    for place, name in enumerate(names):
        if name not in without:
            for module in _modules(name):
                by_module[module].append(place)
    places = {name: place for place, name in enumerate(names)}
    found = {}
    for name in constant:
        for module in _modules(name):
            if others := by_module.get(module):
                index = bisect(others, places[name])
                found[name] = names[others[max(index - 1, 0)]]
                break
    return found


def _modules(name: str) -> list[str]:
    """The modules around a tensor, from the innermost to the whole model, which is ``""``."""
    modules = [""]
    path = name.split(".")[:-1]
    for length in range(1, len(path) + 1):
        modules.insert(0, ".".join(path[:length]))
    return modules


def _checksums(values: Tensor) -> Tensor:
    """int64, shape (4,), on the device of ``values``: two checksums of the bits, and the lowest and highest of them."""
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.reshape(-1)[:: max(1, values.numel() // _MAX_SAMPLES)]
    if not flat.numel():
        return torch.zeros(4, dtype=torch.int64, device=values.device)
    bits = flat.contiguous().view(_SAME_WIDTH_INT[flat.element_size()]).long()
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return torch.stack([bits.sum(), (bits * places).sum(), bits.min(), bits.max()])
