"""torch.distributed.pipelining: telling its dry runs of the loss function from real ones."""

from __future__ import annotations

import sys

__all__ = ["is_dry_run"]

_STAGE = "torch.distributed.pipelining.stage"


def is_dry_run() -> bool:
    """Whether a pipeline stage is calling the loss function only to learn shapes.

    Torch 2.13 does so before the first step, on memory that nothing was written to, so that the loss may be anything.
    """
    if _STAGE not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_backward_metadata_inference" and frame.f_globals.get("__name__") == _STAGE:
            return True
    return False
