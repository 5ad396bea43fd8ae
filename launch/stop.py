"""How a run is asked to save and end. Imports next to nothing, to be there before torch is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["STOP_FILE_VARIABLE", "StopRequest"]

STOP_FILE_VARIABLE = "DISTSCALE_STOP_FILE"


class StopRequest:
    """Whether this process was asked to save and end: by SIGINT, SIGTERM, SIGUSR2 or a stop file.

    The handler only sets a flag, since a signal can arrive in the middle of a collective, or while a checkpoint is
    written; the ranks agree at the next step. More signals change nothing: it is for the launcher to end a run at once.

    Args:
        stop_file: path that is looked for, or "" for none. Whichever rank sees it asks for all.
    """

    def __init__(self, stop_file: str = "") -> None:
        self._file = stop_file
        self._is_signalled = False

    def install(self) -> None:
        """Takes over the three signals; SIGUSR2 is SLURM's warning before the time is up."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def is_made(self) -> bool:
        return self._is_signalled or (bool(self._file) and os.path.exists(self._file))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_signalled = True
