"""How much memory a sweep needs beside the tensors. As a program: prints the growth of this process, in bytes.

python sweep_memory.py distscale.sweep.cpu
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch

from distscale.sweep import Limits, Part
from distscale.sweep.parts import Request

__all__ = ["NUMEL", "largest_block", "use"]

NUMEL = 2**24


def use(backend: Any, numel: int, device: torch.device | str = "cpu") -> Any:
    """Makes tensors and returns what does with them all that a backend does; the last of it meets a NaN."""
    values = torch.ones(numel, device=device)
    copy = torch.ones(numel, dtype=torch.float16, device=device)
    half, zero = torch.tensor(0.5, dtype=torch.float64, device=device), torch.zeros(1, device=device)

    def run() -> None:
        for out in (None, values, copy):
            part = Part(values, 0, 1.0, True, out=out)
            assert backend.takes([part])
            backend.sweep([part], Request(1, half, True))
        backend.scale_([values, copy], half.float(), zero)
        values[-1] = torch.nan
        backend.sweep([Part(values, 0, 1.0, True)], Request(1, half, True, 1, Limits.of(torch.float16)))

    return run


def largest_block(backend: Any, numel: int) -> int:
    """The largest block that one operator of torch asks for, in bytes."""
    run = use(backend, numel)
    # With acc_events, or torch 2.11 warns of events of earlier cycles, which there are none of.
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run()
    return max(event.cpu_memory_usage for event in profile.events())


def _peak() -> int:
    # Not that of getrusage, which begins with the peak of the parent process.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    backend = importlib.import_module(sys.argv[1])
    use(backend, 2**19)()
    run = use(backend, NUMEL)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _peak()
    run()
    print(_peak() - before)
