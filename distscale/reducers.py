"""How ranks talk to each other: the only module that communicates.

A reducer does two things: the one exchange of a step, and a gather of small objects for set-up and for error messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distscale.env import read_environment
from distscale.errors import ConfigError, ProtocolError

__all__ = ["LocalReducer", "ProcessGroupReducer", "Reducer", "default_group", "default_reducer", "picklable"]

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""By which mpirun and srun say that they have started a process, and how many."""


class Reducer(Protocol):
    """The ranks that share one decision."""

    rank: int
    """Of this process among those that share the decision: 0 to world_size - 1."""
    world_size: int

    def device(self, preferred: torch.device) -> torch.device:
        """Returns ``preferred`` if vectors on it can be reduced, else the device to move them to."""

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        """The exchange: elementwise maximum and sum over all ranks, in place.

        Args:
            maxima: int32, shape (n,), contiguous, on a device that :meth:`device` returned; n is equal on all ranks.
            sums: float64, shape (m,), or None on all ranks.

        Collective: yes. Syncs host: as the backend does (gloo: yes, NCCL: no).

        Raises:
            ProtocolError: if a peer died or did not answer within the timeout.
        """

    def gather(self, item: Any) -> list[Any]:
        """Returns every rank's ``item``, by rank. Collective: yes. Syncs host: yes. Never part of a normal step."""


class LocalReducer:
    """A single process, which agrees with itself."""

    rank = 0
    world_size = 1

    def device(self, preferred: torch.device) -> torch.device:
        return preferred

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        return None

    def gather(self, item: Any) -> list[Any]:
        return [item]


class ProcessGroupReducer:
    """All ranks of a ``torch.distributed`` process group or device mesh (default: all ranks of the job).

    Args:
        group: a process group, or a mesh of any number of axes; all its ranks share one decision.

    Raises:
        ConfigError: if ``torch.distributed`` is not initialized, or this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "a process group was asked for, but torch.distributed is not initialized; "
                "call torch.distributed.init_process_group() first"
            )
        given: object = group
        # The mark that new_group() returns on ranks outside the group is an int.
        if (
            not isinstance(given, dist.ProcessGroup | DeviceMesh | None)
            and given is not dist.GroupMember.NON_GROUP_MEMBER
        ):
            raise ConfigError(f"process_group={given!r} is neither a process group nor a device mesh")
        self._given = group
        self.group = _group_of_mesh(group) if isinstance(group, DeviceMesh) else group
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the process_group that its scaler was given; "
                "pass a group that holds every rank which calls step()"
            )
        self.world_size = dist.get_world_size(self.group)
        # "cpu:gloo,cuda:nccl" -> {"cpu", "cuda"}
        backends = dist.get_backend_config(self.group).split(",")
        self._device_types = {entry.split(":")[0] for entry in backends}

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickled it is that of the job and the rank that it is then in.
        return ProcessGroupReducer, (picklable(self._given),)

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupReducer:
        return ProcessGroupReducer(self._given)

    def device(self, preferred: torch.device) -> torch.device:
        if preferred.type in self._device_types:
            return preferred
        if "cpu" in self._device_types:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        with _peer_errors(self.rank, "the exchange of a step"):
            # Both are in flight before either is waited for.
            works = [dist.all_reduce(maxima, dist.ReduceOp.MAX, self.group, async_op=True)]
            if sums is not None:
                works.append(dist.all_reduce(sums, dist.ReduceOp.SUM, self.group, async_op=True))
            for work in works:
                work.wait()

    def gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.world_size
        with _peer_errors(self.rank, "the agreement on tensor names and settings"):
            dist.all_gather_object(items, item, self.group)
        return items


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks of the job, if there is one now."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def picklable(group: dist.ProcessGroup | DeviceMesh | None) -> DeviceMesh | None:
    """``group``, if it can be pickled.

    Raises:
        ConfigError: for a process group, which means nothing in another process.
    """
    if isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "a scaler or reducer with a process group cannot be pickled, since the group is of this process alone; "
            "give a DeviceMesh instead, or save state_dict() and load it into a scaler with the group of that job"
        )
    return group


def default_reducer(group: dist.ProcessGroup | DeviceMesh | None) -> Reducer:
    """The reducer for ``process_group=group``: all ranks by default, this process alone if there are no others.

    Raises:
        ConfigError: if the launcher started several ranks and ``torch.distributed`` is not initialized, since each
            rank would then decide for itself.
    """
    if group is not None or default_group() is not None:
        return ProcessGroupReducer(group)
    world_size = os.environ.get("WORLD_SIZE")
    said = f"WORLD_SIZE={world_size}"
    if world_size is None and any(name in os.environ for name in _SIZES):
        environment = read_environment(os.environ)
        world_size = str(environment.world_size)
        said = f"{environment.launcher} started {world_size} ranks"
    elif world_size is None:
        return LocalReducer()
    if world_size != "1":
        raise ConfigError(
            f"{said}, but torch.distributed is not initialized, so every rank would skip steps on its own; call "
            "distscale.init_distributed() or torch.distributed.init_process_group() before the first step, pass "
            "reducer=distscale.MpiReducer(), or pass reducer=distscale.LocalReducer() if the processes are independent"
        )
    return LocalReducer()


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return None
    return mesh._flatten().get_group()


@contextmanager
def _peer_errors(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProtocolError(
            f"rank {rank}: {what} failed. A peer died, was stopped, or did not answer within the process group's "
            f"timeout; look for the first error among the other ranks. The backend said: {error}"
        ) from error
