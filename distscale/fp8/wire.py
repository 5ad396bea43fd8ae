"""The message that carries gradients from one rank to another in FP8: where what is. Pure.

A gradient is reduced row by row: row ``r`` of ``[world_size, row_numel]`` is what rank ``r`` is to have the sum of.
Each row becomes one message, a whole number of 16 bytes:

    +----------+-----------------------------+---------+---------+----
    | identity | scale_inv, fp32: one a      | tensor  | tensor  |
    | int32    | tensor; or exponents, uint8:| 0       | 1       |  ...
    |          | one a block of 128 values   |         |         |
    +----------+-----------------------------+---------+---------+----

A tensor is FP8 bytes, or bf16 if it is exempt, and begins at a multiple of 16 bytes. ``scale_inv`` is the sender's own:
ranks may scale differently. An exponent is that of a power of two as in the OCP's E8M0 format: ``scale_inv`` is
``2**(byte - 127)``, and NaN for 255. ``identity`` is a digest of the layout, of the names in it and of the recipe, so
that no rank decodes a tensor with the scale of another one, or as another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from distscale.checksum import digest
from distscale.fp8.meter import Metered
from distscale.fp8.recipe import Recipe

__all__ = ["BLOCK", "Layout", "Piece", "Segment", "make_layout", "metered"]

BLOCK = 128
"""Values that share an exponent."""
_ALIGNMENT = 16
_IDENTITY_BYTES = 4


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that lies in each row."""

    name: str
    numel: int
    """Values in one row, padding included."""
    is_fp8: bool
    """Or else bf16."""


@dataclass(frozen=True)
class Segment:
    """Where a piece lies in a row and in its message."""

    piece: Piece
    start: int
    """Of its values in the row."""
    offset: int
    """Of its values in the message, in bytes."""
    scaling: int
    """Of its ``scale_inv`` or exponents in the message, in bytes; meaningless in bf16."""

    @property
    def stop(self) -> int:
        """Of its values in the row."""
        return self.start + self.piece.numel

    @property
    def num_blocks(self) -> int:
        return -(-self.piece.numel // BLOCK)

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.piece.numel * (1 if self.piece.is_fp8 else 2)


@dataclass(frozen=True)
class Layout:
    """Of a message, and of the row that it is made of."""

    segments: tuple[Segment, ...]
    recipe: Recipe
    dtype: torch.dtype
    """The FP8 dtype."""
    is_blockwise: bool
    """A scale for every 128 values, and not for every tensor."""
    row_numel: int
    row_bytes: int
    identity: int
    """Of 31 bits."""

    @property
    def in_fp8(self) -> tuple[Segment, ...]:
        """Segments with a scale of their own, in the order of ``scale`` and of what is seen of them."""
        return tuple(segment for segment in self.segments if segment.piece.is_fp8)


def metered(name: str) -> Metered:
    """The gradient of parameter ``name`` as it is sent."""
    return Metered(f"{name}.grad", is_gradient=True, is_sent=True)


def make_layout(pieces: Sequence[Piece], recipe: Recipe, is_blockwise: bool = False) -> Layout:
    """Lays out a message of ``pieces``, which lie in the row in this order, without gaps."""
    starts = list(accumulate((piece.numel for piece in pieces), initial=0))
    segments = []
    offset = _IDENTITY_BYTES
    scalings = []
    for piece in pieces:
        scalings.append(offset)
        if piece.is_fp8:
            offset += -(-piece.numel // BLOCK) if is_blockwise else 4
    for piece, start, scaling in zip(pieces, starts, scalings, strict=False):
        offset = _aligned(offset)
        segments.append(Segment(piece, start, offset, scaling))
        offset += segments[-1].num_bytes
    dtype = recipe.dtype_of(metered(""))
    identity = digest(
        ([(piece.name, piece.numel, piece.is_fp8) for piece in pieces], recipe.as_dict(), is_blockwise, BLOCK)
    )
    return Layout(tuple(segments), recipe, dtype, is_blockwise, starts[-1], _aligned(offset), identity)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
