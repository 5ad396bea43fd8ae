"""Files that a crash must not leave in pieces, and what tells that one was changed on the disk."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

__all__ = ["checksum", "sync", "write_whole"]

_CHUNK = 1 << 24


def sync(path: Path) -> None:
    """Brings a file, whoever has it open, or the names in a folder, to the disk. Raises: OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old text or the new one; leaves it alone if they are equal.

    Raises:
        OSError: the old text is then still there.
    """
    content = text.encode()
    if path.exists() and path.read_bytes() == content:
        return
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_bytes(content)
    sync(aside)
    aside.replace(path)
    sync(path.parent)


def checksum(path: Path) -> int:
    """Returns the CRC-32 of a file. Raises: OSError."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
