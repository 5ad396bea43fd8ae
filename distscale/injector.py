"""Lets the faults of :mod:`distscale.faults` come about, where a training program calls for them."""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from distscale.errors import ConfigError
from distscale.faults import BAD_VALUES, Fault, InjectedError
from distscale.scaler import DistributedGradScaler

__all__ = ["Injector"]


class Injector:
    """The faults of one life of a job, on one of its ranks.

    Args:
        faults: of all ranks and lives.
        rank: of this process.
        restart: how often the job has been restarted.
    """

    def __init__(self, faults: Iterable[Fault], rank: int, restart: int) -> None:
        self._faults = [fault for fault in faults if fault.restart == restart]
        self._rank = rank

    def check_tensors(self, names: Collection[str]) -> None:
        """Checks that the tensors which are to have bad values are there. Equal on all ranks. Collective: no.

        Raises:
            ConfigError: naming the first that is not.
        """
        for fault in self._faults:
            if fault.tensor and fault.tensor not in names:
                raise ConfigError(
                    f"the fault '{fault}' never comes about: the model has no such tensor; there are {', '.join(names)}"
                )

    def before_exchange(self, step: int, params: Mapping[str, nn.Parameter], scaler: DistributedGradScaler) -> None:
        """To be called when the gradients of a step are there. Collective: no. Syncs host: no.

        Args:
            step: whose exchange comes next.
            params: by name.
            scaler: whose scale may be corrupted; has scaled a loss.

        Raises:
            InjectedError: as the fault ``raise`` says.
            ConfigError: if this rank holds nothing of a tensor that is to have a bad value.
        """
        for fault in self._faults:
            if fault.rank != self._rank or fault.step != step or fault.is_of_checkpoint:
                continue
            if fault.kind in BAD_VALUES:
                _plant(fault, params[fault.tensor])
            elif fault.kind == "raise":
                raise InjectedError(f"raised on purpose by the fault '{fault}'")
            elif fault.kind == "hang":
                threading.Event().wait()
            elif fault.kind == "slow":
                threading.Event().wait(fault.seconds)
            elif fault.kind == "kill":
                _kill()
            else:
                assert fault.kind == "scale" and scaler._scale is not None
                scaler._scale.mul_(2)

    def writer(self, path: Path, step: int) -> FileSystemWriter:
        """Returns what writes the checkpoint after ``step`` steps to the folder ``path``, on the disk as it then is."""
        writer = FileSystemWriter(path)
        for fault in self._of_checkpoint(step, "full_disk", "kill_in_checkpoint"):
            if fault.rank == self._rank:
                writer.fs = _FaultyDisk(fault.kind == "kill_in_checkpoint")
        return writer

    def after_checkpoint(self, path: Path, step: int) -> None:
        """To be called on rank 0 when the checkpoint after ``step`` steps is complete, in the folder ``path``."""
        for fault in self._of_checkpoint(step, "cut_checkpoint"):
            file = path / f"__{fault.rank}_0.distcp"
            os.truncate(file, file.stat().st_size // 2)

    def _of_checkpoint(self, step: int, *kinds: str) -> list[Fault]:
        return [fault for fault in self._faults if fault.step == step and fault.kind in kinds]


class _FaultyDisk(FileSystem):
    """Has room for half of what is written first; then there is no more, or no process any more."""

    def __init__(self, kills: bool) -> None:
        self._kills = kills

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _HalfWritten(io.FileIO(path, mode), self._kills) as stream:
            yield stream


class _HalfWritten(io.BufferedWriter):
    def __init__(self, raw: io.FileIO, kills: bool) -> None:
        super().__init__(raw)
        self._kills = kills

    def write(self, data: Any) -> int:
        super().write(memoryview(data)[: len(data) // 2])
        self.flush()
        if self._kills:
            _kill()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _plant(fault: Fault, param: nn.Parameter) -> None:
    grad = param.grad
    local = grad.to_local() if grad is not None and hasattr(grad, "to_local") else grad
    if local is None or not local.numel():
        raise ConfigError(f"the fault '{fault}' cannot come about: this rank holds no gradient of the tensor")
    local[(0,) * local.dim()] = BAD_VALUES[fault.kind]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
