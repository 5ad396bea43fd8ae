"""One run of a name at a time: two would take each other's checkpoints for their own."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from distscale import ConfigError

__all__ = ["RunLock"]


class RunLock:
    """Holds ``<name>.lock`` beside the folder of a run, until released or until this process ends, however it ends.

    Args:
        folder: of the run; its parents are made if missing.
        is_shared: whether others may hold it as well that are as modest: the checks of several nodes, made at once.

    Raises:
        ConfigError: if another process holds it, or if nothing can be written there.
    """

    def __init__(self, folder: Path, is_shared: bool = False) -> None:
        path = folder.with_name(f"{folder.name}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a+", encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"the run cannot write {path}: {why}; choose another folder in run.out") from None
        try:
            # The file stays when the lock goes: removed, it could be locked twice under one name.
            fcntl.flock(self._file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(
                    f"the run {folder} is in progress in another process; wait for its end, or choose another run.name"
                ) from None
            raise ConfigError(f"{path} cannot be locked: {error.strerror}; choose another run.out") from None

    def release(self) -> None:
        """Lets another process have the name."""
        self._file.close()
