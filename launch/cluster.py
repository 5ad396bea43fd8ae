"""This process among the ranks of the job: which device, which backend, and its last words."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distscale import init_distributed
from distscale.connect import device_of_rank
from distscale.env import Environment

__all__ = ["Cluster", "default_num_ranks", "leave_last_words"]

LAST_WORDS_VARIABLE = "DISTSCALE_LAST_WORDS"


def default_num_ranks() -> int:
    """One rank a GPU; two on a machine without."""
    return torch.cuda.device_count() or 2


def leave_last_words(sentence: str) -> None:
    """Gives ``sentence`` to the wrapper, if there is one, which repeats it below its launcher's report of a failure.

    A wrapper on another host, whose file cannot be seen here, does without.
    """
    if path := os.environ.get(LAST_WORDS_VARIABLE):
        with suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(sentence + "\n")


@dataclass(frozen=True)
class Cluster:
    """This process among the ranks of the job, and its device."""

    environment: Environment
    device: torch.device

    @classmethod
    def from_environment(cls, environment: Environment) -> Cluster:
        """Chooses the device and sets the number of threads; talks to nobody."""
        device = device_of_rank(environment)
        if device.type == "cpu":
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // environment.local_world_size))
        return cls(environment, device)

    @property
    def rank(self) -> int:
        return self.environment.rank

    @property
    def world_size(self) -> int:
        return self.environment.world_size

    def connect(self, timeout_s: float) -> None:
        """Makes the process group of all ranks. Collective: yes.

        Args:
            timeout_s: after which a collective that lacks a rank fails.

        Raises:
            ConfigError: if the ranks cannot find each other.
            ProtocolError: if not all of them came in time.
        """
        if self.device.type == "cuda":
            # A resumed run must repeat the sums of the uninterrupted one bit by bit.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        # mpirun gives no address to meet at when there are several nodes.
        by_mpi = self.environment.launcher in ("openmpi", "mpich") and self.environment.head_address is None
        init_distributed(timeout_s=timeout_s, device=self.device, ask_mpi=by_mpi)
        if by_mpi:
            from mpi4py import MPI

            # That was all, and mpirun takes a process that ends without this for one that has crashed.
            MPI.Finalize()

    def disconnect(self) -> None:
        """Ends the process group. Collective: yes."""
        dist.destroy_process_group()

    def gather(self, item: Any) -> list[Any]:
        """Returns every rank's ``item``, by rank. Collective: yes."""
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def mean(self, value: float) -> float:
        """Returns the mean over ranks of a number. Collective: yes."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.world_size

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on some rank. Collective: yes."""
        raised = torch.tensor(int(flag), dtype=torch.int32, device=self.device)
        dist.all_reduce(raised, dist.ReduceOp.MAX)
        return bool(raised)
