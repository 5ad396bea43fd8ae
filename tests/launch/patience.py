"""A started program that may take long on a busy machine, and is not left behind when the tests are killed."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

from test_pretrain import Program

__all__ = ["DEADLINE_S", "Patient"]

DEADLINE_S = 400.0
LOOK_AGAIN_S = 5.0


class Patient(Program):
    """A program that has minutes, and is asked to end when the process of the tests has ended."""

    def __init__(self, command: list[str], folder: Path) -> None:
        super().__init__(["setpriv", "--pdeathsig", "TERM", *command], folder)
        self._until = self._last = time.monotonic() + DEADLINE_S

    def wait_for(self, pattern: str, goes_on: Callable[[], bool] = lambda: True) -> str:
        """Returns the next line with ``pattern``; gives up soon after ``goes_on`` says that none can come any more."""
        while True:
            can_come = goes_on() and time.monotonic() < self._last
            self._until = time.monotonic() + LOOK_AGAIN_S
            try:
                return super().wait_for(pattern)
            except queue.Empty:
                if not can_come:
                    raise AssertionError(f"no line like {pattern!r} came:\n{self.output}") from None
            finally:
                self._until = self._last
