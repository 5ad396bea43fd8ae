"""Other releases of what the tests need, from the package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["download"]


def download(requirement: str, pattern: str, config: pytest.Config, *options: str) -> Path:
    """Returns the file that pip downloads for ``requirement``; skips the test where it cannot.

    It is kept in pytest's cache for the next run of the tests.

    Args:
        pattern: of the file's name.
        options: more of ``pip download``'s.
    """
    folder = config.cache.mkdir("downloads")
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        ended = subprocess.run([*pip, *options, "--dest", str(folder), requirement], capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"pip cannot fetch {requirement} here: {ended.stderr.strip().splitlines()[-1]}")
    return next(folder.glob(pattern))
