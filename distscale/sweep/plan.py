"""Parts as the native code sees them: ``sweep.h`` mirrored in numpy.

All that stays the same from step to step is laid out once and kept; a step fills in the addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distscale.sweep.parts import Part

__all__ = ["DTYPE_CODES", "PART", "describe", "describe_tensors", "is_native"]

DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Of the dtypes that native code reads."""

_PLAIN = (Tensor, torch.nn.Parameter)

PART = np.dtype(
    [
        ("values", np.uint64),
        ("out", np.uint64),
        ("scale_inv", np.uint64),
        ("numel", np.int64),
        ("weight", np.float64),
        ("dtype", np.int32),
        ("out_dtype", np.int32),
        ("slot", np.int32),
        ("group", np.int32),
        ("is_scaled", np.int32),
        ("unused", np.int32),
    ]
)
assert PART.itemsize == 64


def is_native(part: Part) -> bool:
    """Whether native code can sweep a part: a dtype of :data:`DTYPE_CODES`, and dense values (and out, alike).

    A subclass of Tensor may keep its values elsewhere, or not be there yet, so it is left to torch.
    """
    values, out = part.values, part.out
    if type(values) not in _PLAIN or values.dtype not in DTYPE_CODES or not _is_dense(values):
        return False
    if out is None:
        return True
    return type(out) in _PLAIN and out.dtype in DTYPE_CODES and out.stride() == values.stride() and not values.is_neg()


def describe(parts: Sequence[Part]) -> tuple[NDArray[np.void], tuple[int, ...]]:
    """Lays out ``parts``: an array of :data:`PART` of this call's own, and the sizes as a key for what depends on them.

    Args:
        parts: of one device and of the dtypes of :data:`DTYPE_CODES`; values (and out, alike) dense in memory.
    """
    values, *_, scale_invs, outs = zip(*parts, strict=True)
    numels = tuple([tensor.numel() for tensor in values])
    dtypes = tuple([tensor.dtype for tensor in values])
    out_dtypes = (
        dtypes
        if not any(out is not None for out in outs)
        else tuple([dtype if out is None else out.dtype for dtype, out in zip(dtypes, outs, strict=True)])
    )
    records = _layout(numels, dtypes, out_dtypes, tuple([part[1:5] for part in parts])).copy()
    records["values"] = [tensor.data_ptr() for tensor in values]
    if not records["values"].all() and any(
        numel and not tensor.data_ptr() for tensor, numel in zip(values, numels, strict=True)
    ):
        raise RuntimeError("the memory of a tensor to be swept has been freed (its storage was resized to 0)")
    if out_dtypes is not dtypes:
        records["out"] = [0 if out is None else out.data_ptr() for out in outs]
    if any(scale_inv is not None for scale_inv in scale_invs):
        records["scale_inv"] = [0 if scale_inv is None else scale_inv.data_ptr() for scale_inv in scale_invs]
    return records, numels


def describe_tensors(tensors: Sequence[Tensor]) -> tuple[NDArray[np.void], tuple[int, ...]]:
    """Like :func:`describe`, for what is only multiplied with a factor."""
    return describe([Part(tensor, 0, 1.0, False) for tensor in tensors])


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill the memory from the first to the last, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=256)
def _layout(
    numels: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    out_dtypes: tuple[torch.dtype, ...],
    rest: tuple[tuple[int, float, bool, int], ...],
) -> NDArray[np.void]:
    records = np.zeros(len(numels), PART)
    records["numel"] = numels
    records["dtype"] = [DTYPE_CODES[dtype] for dtype in dtypes]
    records["out_dtype"] = [DTYPE_CODES[dtype] for dtype in out_dtypes]
    records["slot"], records["weight"], records["is_scaled"], records["group"] = zip(*rest, strict=True)
    records.flags.writeable = False
    return records
