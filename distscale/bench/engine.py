"""What the step of a DeepSpeed engine costs with DeepSpeed's own decision and with ours, in one run, interleaved.

::

    torchrun --nproc-per-node 2 -m distscale.bench.engine [--stages 1,2,2-offload,3] [--numel 4194304] [--rounds 30]

Both engines train the same model. The time is that of ``engine.backward()`` and ``engine.step()`` on the slowest rank,
since with offloading DeepSpeed checks gradients in its backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distscale.bench.counting import Counting
from distscale.integrations.deepspeed import coordinate
from distscale.machine import commit, device_name

__all__ = ["measure"]

_WIDTH = 512


def measure(deepspeed: Any, stage: int, offload: bool, numel: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of backward pass and step (median), and what they count, by who decides.

    Args:
        deepspeed: the module, with its process group initialized.
        numel: parameters of the model, about.
        rounds: steps of each engine, which take turns.

    Collective: yes. Syncs host: yes.
    """
    engines = {who: _engine(deepspeed, stage, offload, numel) for who in ("deepspeed", "distscale")}
    coordinate(engines["distscale"])
    times: dict[str, list[float]] = {who: [] for who in engines}
    counts: dict[str, dict[str, float]] = {}
    for number in range(rounds + 2):  # the first two create state and agree on tensors
        for who, engine in engines.items():
            inputs = torch.ones(4, _WIDTH, dtype=torch.half, device=engine.device)
            loss = engine(inputs).float().square().mean()
            backward, step = Counting(), Counting()
            is_counted = number == 1
            dist.barrier()
            started = perf_counter()
            with backward if is_counted else nullcontext():
                engine.backward(loss)
            with step if is_counted else nullcontext():
                engine.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took = torch.tensor(perf_counter() - started, device=engine.device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if is_counted:
                counts[who] = {
                    "all_reduces": step.all_reduces,
                    "host_reads": step.host_reads,
                    "host_reads_of_backward": backward.host_reads,
                }
            elif number > 1:
                times[who].append(float(took) * 1000)
    return {who: {"ms": round(median(times[who]), 3), **counts[who]} for who in engines}


def _engine(deepspeed: Any, stage: int, offload: bool, numel: int) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(max(1, numel // _WIDTH**2))]
    model = nn.Sequential(*layers)
    zero: dict[str, Any] = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "fp16": {"enabled": True, "initial_scale_power": 8},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m distscale.bench.engine")
    parser.add_argument("--stages", default="1,2,2-offload,3", help="ZeRO stages, with -offload or without")
    parser.add_argument("--numel", type=int, default=1 << 22, help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each engine")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} is not allowed: a whole number, 1 or more")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(1)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if not torch.cuda.is_available():
        get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses FP16 on CPUs that lack it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # minutes of compiling
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    for stage in arguments.stages.split(","):
        number, _, offload = stage.partition("-")
        found = measure(deepspeed, int(number), bool(offload), arguments.numel, arguments.rounds)
        if dist.get_rank() == 0:
            device = device_name(torch.device(get_accelerator().device_name()))
            about = {"stage": stage, "ranks": dist.get_world_size(), "numel": arguments.numel}
            print(json.dumps({**about, "device": device, "commit": commit(), **found}), flush=True)


if __name__ == "__main__":
    _main()
