"""Real DeepSpeed engines on gloo ranks of a CPU, for the tests of several files."""

from __future__ import annotations

import gc
import logging
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from distscale.integrations.deepspeed import Coordination, coordinate

os.environ["DS_ACCELERATOR"] = "cpu"

BAD_VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
HALF = {True: torch.half, False: torch.bfloat16}


def import_deepspeed() -> Any:
    """DeepSpeed, which trains in FP16 on any CPU: it refuses to on those without instructions for it."""
    warnings.simplefilter("ignore")  # what DeepSpeed and torch say of each other is not ours
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import compiler

    get_accelerator().is_fp16_supported = lambda: True
    # DeepSpeed never initializes the padding of its partitions. Let it be NaN always, not now and then.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    # All-reduces of a CPU through shared memory: minutes of compiling, and not what is tested.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Every engine imports Muon, and so torch's compiler: ten seconds, and not what is tested.
    compiler.compile = lambda: lambda function: function
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def join_ranks() -> Any:
    """DeepSpeed, on the process group that there is."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo", dist_init_required=False)
    gc.freeze()  # DeepSpeed collects garbage for every engine, which takes a second with all that torch has imported
    return deepspeed


@dataclass(frozen=True)
class Layout:
    """A kind of engine."""

    stage: int
    fp16: bool = True
    offload: bool = False
    fused: bool = False
    clip: float = 0.0
    accumulation: int = 1
    fp16_block: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        # The buckets, half a gigabyte each by default, are filled, too; see import_deepspeed.
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, **self.fp16_block}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **({"fp16": fp16} if self.fp16 else {"bf16": {"enabled": True}}),
            **self.extra,
        }


def tiny_net() -> nn.Module:
    """Seven and four parameters: the partitions of several ranks are uneven, and some are empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))


class Slope(nn.Module):
    """A loss whose gradient is 1 in every element, at any parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 6))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight.float().sum() + self.bias.float().sum()) * factor


def plain_engine(layout: Layout, model: nn.Module, optimizer: Any = None, scheduler: Any = None, **more: Any) -> Any:
    """As DeepSpeed makes it."""
    deepspeed = import_deepspeed()
    if optimizer is None:
        optimizer = fused_sgd(model.parameters()) if layout.fused else SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=None if scheduler is None else scheduler(optimizer),
        config=layout.config,
        dist_init_required=False,
        **more,
    )
    return engine


def coordinated(layout: Layout, model: nn.Module, overrides: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """The same, with one decision for all ranks."""
    engine = plain_engine(layout, model, **more)
    coordination = coordinate(engine, **(overrides or {}))
    assert isinstance(coordination, Coordination)
    return engine


def state_of(engine: Any) -> list[Tensor]:
    """Copies of this rank's parameters, master parameters and optimizer state."""
    tensors: list[Any] = []
    for param in engine.module.parameters():
        piece = getattr(param, "ds_tensor", param)
        if piece is not param:  # without the padding of the last piece, which is never initialized
            piece = piece[: max(0, param.ds_numel - dist.get_rank() * piece.numel())]
        tensors.append(piece)
    for group in engine.optimizer.optimizer.param_groups:
        for param in group["params"]:
            tensors += [param, *engine.optimizer.optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in tensors if isinstance(tensor, Tensor)]


def spoil(engine: Any, value: float) -> bool:
    """Puts ``value`` into one element of a gradient that this rank holds; returns whether it holds one."""
    for gradient in engine.distscale._surface.gradients():
        if gradient.values.numel():
            gradient.values.view(-1)[-1:].fill_(value)
            return True
    return False


def fused_sgd(params: Any) -> Any:
    """What DeepSpeed takes for a fused optimizer by its type, without the kernels that the type would compile."""
    from deepspeed.ops.adam import FusedAdam

    def new(self: Any, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": 1.0})

    def step(self: Any, closure: None = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param -= group["lr"] * param.grad

    return type("FusedSGD", (FusedAdam,), {"__init__": new, "step": step})(params)
