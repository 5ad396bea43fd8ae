"""What tests of the pretraining program share: a tiny run, and a launcher of which nothing is left when time is up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["run_in_session", "tiny_config"]


def tiny_config(num_steps: int, rest: str, name: str = "tiny", layers: int = 1, width: int = 32) -> str:
    """Returns the TOML of a run on text.txt that takes milliseconds a step; ``rest`` goes on in its section [train]."""
    return f"""
[run]
name = "{name}"
steps = {num_steps}
[model]
layers = {layers}
width = {width}
heads = 2
sequence = 32
[data]
path = "text.txt"
[train]
batch = 4
lr = 1e-2
warmup = 2
eval_batches = 2
{rest}"""


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
