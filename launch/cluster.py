"""This process among the ranks of the job: which device, which backend, and how a stop is asked for."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from launcher import find_peers

__all__ = ["Cluster", "StopRequest", "default_num_ranks", "leave_last_words"]

STOP_FILE_VARIABLE = "DISTSCALE_STOP_FILE"
LAST_WORDS_VARIABLE = "DISTSCALE_LAST_WORDS"
# torchrun may pass on a signal that the terminal has delivered already: that is one request, not two.
SAME_REQUEST_S = 2.0


def default_num_ranks() -> int:
    """One rank a GPU; two on a machine without."""
    return torch.cuda.device_count() or 2


def leave_last_words(sentence: str) -> None:
    """Gives ``sentence`` to the wrapper, if there is one, which repeats it below torchrun's report of a failure."""
    if path := os.environ.get(LAST_WORDS_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(sentence + "\n")


@dataclass(frozen=True)
class Cluster:
    """The place of this process, from torchrun's variables; a process without them is alone."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @classmethod
    def from_environment(cls) -> Cluster:
        """Reads the environment and sets the number of threads; talks to nobody."""
        rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # NCCL cannot share a GPU between ranks, so with too few of them the run is one on CPUs.
        if 0 < local_world_size <= torch.cuda.device_count():
            device = torch.device("cuda", local_rank)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        return cls(rank, local_rank, world_size, device)

    def connect(self, timeout_s: float) -> None:
        """Makes the process group of all ranks. Collective: yes.

        Args:
            timeout_s: after which a collective that lacks a rank fails.

        Raises:
            ConfigError: if mpirun has started the ranks, and they lack what they would find each other by.
        """
        find_peers(self.device)
        if self.device.type == "cuda":
            # A resumed run must repeat the sums of the uninterrupted one bit by bit.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False
            torch.cuda.set_device(self.device)
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        if "RANK" not in os.environ:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if self.device.type == "cuda":
            options["device_id"] = self.device
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", **options)

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


class StopRequest:
    """Whether this process was asked to save and end: by SIGINT, SIGTERM, SIGUSR2 or a stop file.

    The handler only takes a note, since a signal can arrive in the middle of a collective; the ranks agree at
    the next step. A second signal ends the process at once.

    Args:
        stop_file: path that is looked for, or "" for none. Rank 0 alone need look.
    """

    def __init__(self, stop_file: str = "") -> None:
        self._file = Path(stop_file) if stop_file else None
        self._since: float | None = None

    def install(self) -> None:
        """Takes over the three signals; SIGUSR2 is SLURM's warning before the time is up."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def is_made(self) -> bool:
        return self._since is not None or (self._file is not None and self._file.exists())

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is not None and now - self._since > SAME_REQUEST_S:
            os._exit(128 + number)
        self._since = now if self._since is None else self._since
