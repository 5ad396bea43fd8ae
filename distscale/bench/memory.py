"""How much memory a sweep takes beside the gradients, measured in a process of its own.

Only there is the process's peak the sweep's. ``ru_maxrss`` would not do: a child inherits its parent's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import subprocess
import sys
from pathlib import Path

import torch

from distscale.bench.candidate import DTYPES
from distscale.sweep import Part, sweep

__all__ = ["memory_growth"]


def memory_growth(dtype: str, numel: int, num_tensors: int, device: torch.device, num_threads: int) -> int:
    """Bytes by which the peak memory of a process grows in its first sweep over all gradients.

    Raises:
        RuntimeError: with what the process wrote, if it failed.
    """
    arguments = [dtype, str(numel), str(num_tensors), str(device), str(num_threads)]
    child = subprocess.run([sys.executable, "-m", __name__, *arguments], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"the process that measures memory ended with {child.returncode}:\n{child.stderr}")
    growth: int = json.loads(child.stdout)
    return growth


def _measure(dtype: torch.dtype, numel: int, num_tensors: int, device: torch.device) -> int:
    # Filled in place, so that nothing but the gradients was ever allocated. One NaN each: counting them is part of it.
    grads = [
        torch.empty(numel // num_tensors + (index < numel % num_tensors), dtype=dtype, device=device).fill_(1.0)
        for index in range(num_tensors)
    ]
    for grad in grads:
        grad[-1:].fill_(float("nan"))
    parts = [Part(grad, slot, 1.0, True) for slot, grad in enumerate(grads)]
    inv_scale = torch.ones((), dtype=torch.float64, device=device)
    sweep([Part(grads[0][:1], 0, 1.0, True)], 1, inv_scale, True, device)  # loads the code
    before = _peak(device, reset=True)
    sweep(parts, len(parts), inv_scale, True, device)
    return _peak(device) - before


def _peak(device: torch.device, *, reset: bool = False) -> int:
    """Largest number of bytes so far, or since a reset. A reset gives back what is free in the heap."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if reset:
        with contextlib.suppress(AttributeError):  # glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):  # some containers forbid it; then the peak is that of importing torch
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype", type=DTYPES.__getitem__)
    parser.add_argument("numel", type=int)
    parser.add_argument("num_tensors", type=int)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("num_threads", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    print(_measure(arguments.dtype, arguments.numel, arguments.num_tensors, arguments.device))


if __name__ == "__main__":
    _main()
