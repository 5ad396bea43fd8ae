"""One checksum of plain values, equal in every process."""

from __future__ import annotations

import zlib
from typing import Any

__all__ = ["digest"]


def digest(value: Any) -> int:
    """31 bits of a checksum of a plain value."""
    return zlib.crc32(repr(value).encode()) & 0x7FFFFFFF
