"""A layout as the native code sees it: ``wire.h`` mirrored in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distscale.fp8.wire import BLOCK, Layout
from distscale.sweep.plan import DTYPE_CODES

__all__ = ["ROW_DTYPES", "Plan", "code_of_key", "new_results", "plan"]

ROW_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Of the rows that native code reads."""

_CHUNK_NUMEL = 64 * BLOCK
"""Values that a thread, or a block of threads on a GPU, takes at a time: many more than it costs to get them."""

_TO_NEAREST = -1

_SEGMENT = np.dtype([(name, np.int64) for name in ("start", "numel", "offset", "scaling", "entry")])
_CHUNK = np.dtype([("segment", np.int32), ("index", np.int32)])
_MESSAGE = np.dtype(
    [
        *[(name, np.uint64) for name in ("segments", "chunks")],
        *[(name, np.int64) for name in ("num_segments", "num_chunks", "chunk_numel")],
        *[(name, np.int64) for name in ("num_rows", "row_numel", "row_bytes", "header_bytes")],
        ("room", np.float64),
        *[(name, np.int32) for name in ("row_dtype", "dtype", "is_blockwise", "power_of_two", "identity", "unused")],
    ]
)
assert (_SEGMENT.itemsize, _CHUNK.itemsize, _MESSAGE.itemsize) == (40, 8, 104)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a layout consists of, and how a row is cut into chunks."""

    layout: Layout
    segments: NDArray[np.void]
    chunks: NDArray[np.void]
    chunk_numel: int

    @property
    def addresses(self) -> tuple[int, int]:
        """Of both tables, in the host's memory."""
        return self.segments.ctypes.data, self.chunks.ctypes.data

    def describe(self, num_rows: int, row_dtype: torch.dtype, segments: int, chunks: int) -> NDArray[np.void]:
        """A record that tells native code everything but the values.

        Args:
            segments: the address of the table of this name where the native code runs.
            chunks: likewise.
        """
        layout = self.layout
        header_bytes = 4 + sum(segment.num_blocks if layout.is_blockwise else 4 for segment in layout.in_fp8)
        record = np.zeros(1, _MESSAGE)
        record["segments"], record["chunks"] = segments, chunks
        record["num_segments"], record["num_chunks"] = len(self.segments), len(self.chunks)
        record["chunk_numel"], record["num_rows"] = self.chunk_numel, num_rows
        record["row_numel"], record["row_bytes"] = layout.row_numel, layout.row_bytes
        record["header_bytes"] = header_bytes
        record["room"] = torch.finfo(layout.dtype).max * 2.0**-layout.recipe.margin
        record["row_dtype"], record["dtype"] = DTYPE_CODES[row_dtype], DTYPE_CODES[layout.dtype]
        record["is_blockwise"], record["power_of_two"] = layout.is_blockwise, layout.recipe.power_of_two
        record["identity"] = layout.identity
        return record


def plan(layout: Layout) -> Plan:
    """The plan of ``layout``, made once."""
    return _plan(layout, _CHUNK_NUMEL)


def code_of_key(key: int | None) -> int:
    """The key of stochastic rounding, or that there is none, as native code takes it."""
    return _TO_NEAREST if key is None else key & 0xFFFFFFFF


def new_results(rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what becomes of ``rows``: messages, of any content; amax bits and numbers of saturated values, 0."""
    num_fp8 = len(layout.in_fp8)
    messages = rows.new_empty(len(rows), layout.row_bytes, dtype=torch.uint8)
    zeros = rows.new_zeros(3 * num_fp8, dtype=torch.int32)
    return messages, zeros[2 * num_fp8 :], zeros[: 2 * num_fp8].view(torch.int64)


@lru_cache(maxsize=256)
def _plan(layout: Layout, chunk_numel: int) -> Plan:
    segments = np.zeros(len(layout.segments), _SEGMENT)
    for record, segment in zip(segments, layout.segments, strict=True):
        record["start"], record["numel"] = segment.start, segment.piece.numel
        record["offset"], record["scaling"] = segment.offset, segment.scaling
    is_fp8 = np.array([segment.piece.is_fp8 for segment in layout.segments], np.bool_)
    segments["entry"] = np.where(is_fp8, np.cumsum(is_fp8) - 1, -1)
    chunks_of = -(-segments["numel"] // chunk_numel)
    chunks = np.empty(chunks_of.sum(), _CHUNK)
    chunks["segment"] = np.repeat(np.arange(len(segments)), chunks_of)
    chunks["index"] = np.arange(len(chunks)) - np.repeat(np.cumsum(chunks_of) - chunks_of, chunks_of)
    return Plan(layout, segments, chunks, chunk_numel)
