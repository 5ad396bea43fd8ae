"""The sweep of tensors in the host's memory, by the native library: ``sweep.cpp`` behind ctypes.

A call releases the GIL, and uses as many threads as torch would, where the tensors are worth it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distscale.sweep.choice import Unavailable
from distscale.sweep.parts import Count, Part, Request, Swept
from distscale.sweep.plan import are_native, describe, describe_tensors

__all__ = ["check", "load", "read", "scale_", "sweep", "takes"]

_ABI = 2
_NAME = "libdistscale.so"
_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True)
class _Library:
    """The loaded library."""

    isa: str
    """The instruction set that it uses here."""
    description: str
    """Of what it is, for people."""
    functions: ctypes.CDLL


@lru_cache(maxsize=1)
def load() -> _Library:
    """Loads the library, once.

    Raises:
        Unavailable: if it was not built, or is of another version.
    """
    path = _find()
    if path is None:
        raise Unavailable(
            "the native CPU library was not built; install a C++17 compiler (Debian, Ubuntu: apt-get install g++)"
            " and install distscale again (pip -v says what failed)"
        )
    try:
        functions = ctypes.CDLL(str(path))
        abi = functions.distscale_abi()
    except (OSError, AttributeError) as error:
        raise Unavailable(f"the native CPU library cannot be loaded ({error}); install distscale again") from error
    if abi != _ABI:
        raise Unavailable(f"the native CPU library {path} is of another version of distscale; install distscale again")
    functions.distscale_isa.restype = ctypes.c_char_p
    functions.distscale_compiler.restype = ctypes.c_char_p
    functions.distscale_sweep.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER]
    functions.distscale_scale.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, _INT]
    functions.distscale_read.argtypes = [_POINTER, _LONG, _INT]
    functions.distscale_quantize.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _INT]
    functions.distscale_sum_rows.argtypes = [_POINTER, _POINTER, _DOUBLE, _POINTER, _INT]
    isa, compiler = functions.distscale_isa().decode(), functions.distscale_compiler().decode()
    return _Library(isa, f"native CPU library, {isa}, built with {compiler}", functions)


def takes(parts: Sequence[Part]) -> bool:
    """Whether all are of a native dtype and dense in memory."""
    return are_native(parts)


def sweep(parts: Sequence[Part], request: Request) -> Swept:
    """Checks and measures parts in the host's memory; see :func:`distscale.sweep.reference.sweep`.

    Syncs host: only if ``request.inv_scale`` is on a device.
    """
    records, _ = describe(parts, request)
    inv_scale = request.inv_scale.cpu()
    slots = torch.zeros(request.num_slots, dtype=torch.int32)
    counts = torch.zeros(request.num_slots, len(Count), dtype=torch.int64)
    sums = torch.zeros(request.num_groups, dtype=torch.float64) if request.want_norm else None
    limits = None if request.limits is None else np.array(request.limits, np.float64)
    check(
        load().functions.distscale_sweep(
            records.ctypes.data,
            len(records),
            inv_scale.data_ptr(),
            None if limits is None else limits.ctypes.data,
            torch.get_num_threads(),
            slots.data_ptr(),
            None if sums is None else sums.data_ptr(),
            counts.data_ptr(),
        )
    )
    return Swept(slots, sums, counts)


def scale_(tensors: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None) -> None:
    """Multiplies tensors in place; see :func:`distscale.sweep.reference.scale_`.

    Syncs host: only if ``factor`` or ``found_inf`` is on a device.
    """
    records, _ = describe_tensors(tensors)
    records["out"] = records["values"]
    factor = factor.cpu()
    found_inf = None if found_inf is None else found_inf.cpu()
    check(
        load().functions.distscale_scale(
            records.ctypes.data,
            len(records),
            factor.data_ptr(),
            None if found_inf is None else found_inf.data_ptr(),
            torch.get_num_threads(),
        )
    )


def read(tensors: Sequence[Tensor]) -> None:
    """Reads tensors and does nothing with them: the limit of what a sweep can reach on this machine."""
    records: NDArray[np.void] = describe_tensors(tensors)[0]
    check(load().functions.distscale_read(records.ctypes.data, len(records), torch.get_num_threads()))


def check(status: int) -> None:
    """Raises what the status of a call of the library says."""
    if status:
        raise MemoryError("there was no memory for the results of the native library")


def _find() -> Path | None:
    # In an editable installation the package has two directories: that of the sources and that of what was built.
    directories = sys.modules[__name__.rpartition(".")[0]].__path__
    return next((path for path in (Path(directory, _NAME) for directory in directories) if path.exists()), None)
