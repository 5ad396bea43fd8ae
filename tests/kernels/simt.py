"""The CUDA kernels on the host: compiled by g++ under simt.h, in the place of a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from distscale.sweep import nvrtc

__all__ = ["NUM_THREADS", "HostGpu", "build"]

NUM_THREADS = 64
"""Of a block: two warps, so that quick cases have something to join."""
_HERE = Path(__file__).parent


def build(directory: Path, program: nvrtc.Program = nvrtc.SWEEP) -> Path:
    """Compiles a program as a library into ``directory``; skips the test without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to run the CUDA kernels on the host with: install g++")
    library = directory / "libsimt.so"
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    command += ["-fsanitize=alignment"]  # without its library: simt.h has what it calls
    command += [f"-DDISTSCALE_THREADS={NUM_THREADS}", *(f"-I{path.parent}" for path in program.files), f"-I{_HERE}"]
    harness = _HERE / f"{program.files[0].stem}_harness.cpp"
    done = subprocess.run([*command, str(harness), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


class HostGpu:
    """Stands in for :class:`distscale.sweep.cuda.Gpu`; its memory is the host's."""

    description = "host"

    def __init__(self, library: Path, num_blocks: int = 3) -> None:
        self._library = ctypes.CDLL(str(library))
        self._num_blocks = num_blocks
        self.is_in_capture = False
        self.seed = 0
        self.launches: list[str] = []

    def num_blocks(self, kernel: str) -> int:
        return self._num_blocks

    def is_capturing(self) -> bool:
        return self.is_in_capture

    def send(self, array: NDArray[Any], *, wait: bool = False) -> Tensor:
        return torch.from_numpy(array.reshape(-1).view(np.uint8).copy())

    def launch(self, kernel: str, num_blocks: int, *arguments: int | float) -> None:
        """Every launch draws another order of blocks, warps and lanes."""
        self.seed += 1
        self.launches.append(kernel)
        wide = [ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value) for value in arguments]
        status = getattr(self._library, f"simt_{kernel}")(num_blocks, ctypes.c_uint(self.seed), *wide)
        assert status == 0, f"{kernel} did not end; see what was written to stderr (seed {self.seed})"
