"""A started program that may take long on a busy machine, and is not left behind when the tests are killed."""

from __future__ import annotations

import queue
import time
from pathlib import Path

from test_pretrain import Program

__all__ = ["DEADLINE_S", "Patient"]

DEADLINE_S = 400.0


class Patient(Program):
    """A program that has minutes, and is asked to end when the process of the tests has ended."""

    def __init__(self, command: list[str], folder: Path) -> None:
        super().__init__(["setpriv", "--pdeathsig", "TERM", *command], folder)
        self._until = time.monotonic() + DEADLINE_S

    def wait_for(self, pattern: str) -> str:
        try:
            return super().wait_for(pattern)
        except queue.Empty:
            raise AssertionError(f"no line like {pattern!r} came in time:\n{self.output}") from None
