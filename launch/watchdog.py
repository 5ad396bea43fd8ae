"""Who ends a rank that hangs, if its launcher does not, and says where."""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["Watchdog"]

# A rank that its peers have given up is ended by its launcher, if at all. If not, it waits for that long.
STUCK_TIMEOUTS = 5
_NUM_CALLS = 5


class Watchdog:
    """Ends this process with exit code 1, wherever it is then, if a step that has begun is not followed in time.

    A thread says rank, step, seconds and the innermost calls of the thread that began the step, and then where every
    thread was. If somebody keeps Python's lock, so that it cannot, faulthandler does the latter, one timeout later.

    Args:
        rank: to be named.
        timeout_s: of a collective; a step has five times that.
        tell: also gets the sentence.
    """

    def __init__(self, rank: int, timeout_s: float, tell: Callable[[str], None]) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._tell = tell
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def begin(self, step: int) -> None:
        """Says that this step, or what follows the last one, begins; takes 50 us."""
        self._step = step
        self._watched = threading.get_ident()
        self._until = time.monotonic() + STUCK_TIMEOUTS * self._timeout_s
        faulthandler.dump_traceback_later((STUCK_TIMEOUTS + 1) * self._timeout_s, exit=True)
        if not self._thread.is_alive():
            self._thread.start()

    def _watch(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            threading.Event().wait(left)
        calls = traceback.walk_stack(sys._current_frames()[self._watched])
        places = [
            f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"
            for frame, line in itertools.islice(calls, _NUM_CALLS)
        ]
        sentence = (
            f"error: rank {self._rank} at step {self._step}: ends itself, since this step has not ended in "
            f"{STUCK_TIMEOUTS * self._timeout_s:g} s, {STUCK_TIMEOUTS} times parallel.timeout_s; it waits in "
            f"{', called by '.join(places)}"
        )
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
        self._tell(sentence)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)
