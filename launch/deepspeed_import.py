"""DeepSpeed, made ready for the device of the run."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch

__all__ = ["import_deepspeed"]


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed, which takes seconds. Collective: no. Raises: ModuleNotFoundError."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it also in a process that is alone
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # That torch means to rename what DeepSpeed uses, and that a step was skipped, of which our report says more.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    logging.getLogger("DeepSpeed").addFilter(lambda record: "OVERFLOW!" not in record.getMessage())
    if device.type == "cpu":
        _prepare_cpu(deepspeed)
    return deepspeed


def _prepare_cpu(deepspeed: Any) -> None:
    """Lets DeepSpeed train in FP16 on any CPU, at once.

    It refuses FP16 on a CPU without instructions for it; the GPT stores FP16, and multiplies in FP32. And it would
    compile a library for a minute or two, which is for inference alone.
    """
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
