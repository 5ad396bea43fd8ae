"""Counts what a step costs beside arithmetic: collectives, and waits of the host for a value."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Counting"]

_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts all-reduces, and reads of single values by the host, in this process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all_reduces = 0
        self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.all_reduces += name == "c10d::allreduce_"
        self.host_reads += name in _READS
        return func(*args, **(kwargs or {}))
