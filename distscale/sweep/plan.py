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

from distscale.sweep.parts import Part, Request

__all__ = ["DTYPE_CODES", "PART", "are_native", "describe", "describe_tensors"]

DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Of the dtypes that native code reads."""

_PLAIN = {Tensor, torch.nn.Parameter}

_FREED = "the memory of a tensor to be swept has been freed (its storage was resized to 0)"

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


def are_native(parts: Sequence[Part]) -> bool:
    """Whether native code can sweep all: dtypes of :data:`DTYPE_CODES`, and dense values (and out, alike).

    A subclass of Tensor may keep its values elsewhere, or not be there yet, so it is left to torch.
    """
    if not _are_readable([part.values for part in parts]):
        return False
    with_out = [(part.values, part.out) for part in parts if part.out is not None]
    scaled = [(part.values, part.scale_inv) for part in parts if part.scale_inv is not None]
    return (
        _are_readable([out for _, out in with_out])
        and all([_is_like(out, values) for values, out in with_out])  # noqa: C419
        and all([_is_number(scale_inv, values.device) for values, scale_inv in scaled])  # noqa: C419
    )


def describe(parts: Sequence[Part], request: Request) -> tuple[NDArray[np.void], tuple[int, ...]]:
    """Lays out ``parts``: an array of :data:`PART` of this call's own, and the sizes as a key for what depends on them.

    Args:
        parts: at least one, of one device, for which :func:`are_native` holds.

    Raises:
        IndexError: if a slot or a group is not among those of the request.
        RuntimeError: if the memory of a tensor has been freed.
    """
    values, *columns, scale_invs, outs = zip(*parts, strict=True)
    none = (None,) * len(parts)
    has_outs = outs != none
    out_dtypes = [part.values.dtype if part.out is None else part.out.dtype for part in parts] if has_outs else None
    records, numels = _records(values, out_dtypes, tuple(columns))
    for name, number in (("slot", request.num_slots), ("group", request.num_groups)):
        if records[name].min() < 0 or records[name].max() >= number:
            raise IndexError(
                f"a part has the {name} {records[name].max()} or {records[name].min()}; there are {number}"
            )
    if has_outs:
        records["out"] = [0 if out is None else out.data_ptr() for out in outs]
        if any(
            out is not None and numel and not at for out, numel, at in zip(outs, numels, records["out"], strict=True)
        ):
            raise RuntimeError(_FREED)
    if scale_invs != none:
        records["scale_inv"] = [0 if scale_inv is None else scale_inv.data_ptr() for scale_inv in scale_invs]
    return records, numels


def describe_tensors(tensors: Sequence[Tensor]) -> tuple[NDArray[np.void], tuple[int, ...]]:
    """Like :func:`describe`, for what is only multiplied with a factor."""
    return _records(tensors, None, ())


def _are_readable(tensors: Sequence[Tensor]) -> bool:
    # Comprehensions, and sets of what there are few of: a step may bring thousands of tensors.
    return (
        {type(tensor) for tensor in tensors} <= _PLAIN
        and {tensor.dtype for tensor in tensors} <= DTYPE_CODES.keys()
        and all([tensor.is_contiguous() or _is_dense(tensor) for tensor in tensors])  # noqa: C419
    )


def _records(
    tensors: Sequence[Tensor], out_dtypes: Sequence[torch.dtype] | None, columns: tuple[tuple[float, ...], ...]
) -> tuple[NDArray[np.void], tuple[int, ...]]:
    numels = tuple(map(Tensor.numel, tensors))
    dtypes = tuple([tensor.dtype for tensor in tensors])
    records = _layout(numels, dtypes, dtypes if out_dtypes is None else tuple(out_dtypes), columns).copy()
    addresses = list(map(Tensor.data_ptr, tensors))
    if not all(addresses) and any(numel and not at for numel, at in zip(numels, addresses, strict=True)):
        raise RuntimeError(_FREED)
    records["values"] = addresses
    return records, numels


def _is_like(out: Tensor, values: Tensor) -> bool:
    """Whether the values of both lie in the same order; ``out`` gets their signs too, which a view may turn around."""
    same = (out.shape, out.stride(), out.device) == (values.shape, values.stride(), values.device)
    return same and not values.is_neg() and not out.is_neg()


def _is_number(tensor: Tensor, device: torch.device) -> bool:
    return type(tensor) in _PLAIN and (tensor.dtype, tensor.device, tensor.numel()) == (torch.float32, device, 1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill the memory from the first to the last, in any order of the dimensions."""
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
    columns: tuple[tuple[float, ...], ...],
) -> NDArray[np.void]:
    records = np.zeros(len(numels), PART)
    records["numel"] = numels
    records["dtype"] = [DTYPE_CODES[dtype] for dtype in dtypes]
    records["out_dtype"] = [DTYPE_CODES[dtype] for dtype in out_dtypes]
    for name, column in zip(Part._fields[1:5], columns, strict=False):
        records[name] = column
    records.flags.writeable = False
    return records
