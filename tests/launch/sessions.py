"""Runs a launcher in a process group of its own, so that nothing is left of it if it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_in_session"]


def run_in_session(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], deadline_s: float, stderr: int
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run``, with ``environment`` added and stdout captured; the deadline kills the whole group."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
