"""What a measurement or a report of a fault must say of the machine and the software it was made with."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import distscale

__all__ = ["OtherWork", "available_memory", "commit", "device_name", "hardware", "versions"]

_STAT = Path("/proc/stat")


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, GPUs."""
    return {
        "cpu": device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpus": [device_name(torch.device("cuda", index)) for index in range(torch.cuda.device_count())],
    }


def device_name(device: torch.device) -> str:
    """The model of a processor or a GPU, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Of what has a part in the numbers; CUDA's is None in a torch without it."""
    return {
        "distscale": distscale.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "platform": platform.platform(),
    }


def commit() -> str | None:
    """The commit that this package is checked out at, with ``+changes`` if it was changed; None if it is installed."""
    package = Path(__file__).parent
    # An installed package may lie inside the checkout of something else.
    if _git(package, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    changed = _git(package, "status", "--porcelain", "--", ".")
    return f"{_git(package, 'rev-parse', 'HEAD')}{'+changes' if changed else ''}"


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device`` or, for the CPU, without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available")


class OtherWork:
    """How many cores other processes keep busy, from the making of this object on."""

    def __init__(self) -> None:
        self._start, self._before = time.monotonic(), _others_s()

    def cores(self) -> float | None:
        """On average until now; None where the system does not tell."""
        if self._before is None or (now := _others_s()) is None:
            return None
        return max(0.0, (now - self._before) / (time.monotonic() - self._start))


def _others_s() -> float | None:
    """Processor seconds that were spent, and not by this process: by others, the kernel and the host."""
    try:
        user, nice, system, _idle, _iowait, *rest = map(int, _STAT.read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
