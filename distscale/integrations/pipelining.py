"""torch.distributed.pipelining: telling its dry runs from real ones."""

from __future__ import annotations

import sys

__all__ = ["is_dry_run"]

_STAGE = "torch.distributed.pipelining.stage"
_DRY_RUNS = ("_forward_metadata_inference", "_backward_metadata_inference")


def is_dry_run() -> bool:
    """Whether a pipeline stage is calling its module, or the loss function, only to learn shapes.

    Torch 2.13 does so before the first step, on memory that nothing was written to, so that the loss may be anything.
    """
    if _STAGE not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _DRY_RUNS and frame.f_globals.get("__name__") == _STAGE:
            return True
    return False
