"""The CPU library on one instruction set after the other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distscale.sweep import cpu

__all__ = ["ISAS", "on_isa"]

ISAS = ["plain", "avx2", "avx512"]


@contextmanager
def on_isa(isa: str, directory: Path) -> Iterator[None]:
    """Lets :mod:`distscale.sweep.cpu` use ``isa`` meanwhile; skips the test where there is none.

    The library chooses when it is first used; a copy of it, in ``directory``, is another library to the linker.
    """
    with pytest.MonkeyPatch.context() as patch:
        built = cpu._find()
        if built is None:
            pytest.skip("the CPU library was not built")
        copy = shutil.copy(built, directory)
        patch.setattr(cpu, "_find", lambda: copy)
        patch.setenv("DISTSCALE_ISA", isa)
        cpu.load.cache_clear()
        try:
            if cpu.load().isa != isa:
                pytest.skip(f"this processor has no {isa}")
            yield
        finally:
            cpu.load.cache_clear()
