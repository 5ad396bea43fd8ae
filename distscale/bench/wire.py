"""What the reduce-scatter of gradients takes in fp32, in bf16 and in FP8, in one run, in turn.

::

    torchrun --nproc-per-node 2 -m distscale.bench.wire [--mib 64] [--rounds 10] [--granularity tensor]

fp32 and bf16 are torch's ``reduce_scatter_tensor``; bf16 casts before it and back after it. FP8 is what
:func:`distscale.fp8.send_gradients_in_fp8` does: quantize, all-to-all, sum. The time is that of the slowest rank.
docs/fp8.md says how to measure it on a network of two hosts of one machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distscale.connect import init_distributed
from distscale.fp8 import DelayedScaling, Fp8Scales
from distscale.fp8.collectives import reduce_scatter
from distscale.fp8.sender import Sender, Traffic, WireOptions
from distscale.fp8.wire import Piece
from distscale.machine import commit, device_name

__all__ = ["measure"]

_NUM_TENSORS = 16


def measure(numel: int, rounds: int, is_blockwise: bool, device: torch.device) -> dict[str, Any]:
    """Milliseconds (median over rounds) and bytes that each rank sends, by format; and the relative error of FP8.

    Args:
        numel: gradient values on each rank, 16 for each of the ranks at least. There are two ranks or more.
        rounds: of each, in turn; one or more.

    Collective: yes. Syncs host: yes.
    """
    world_size, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    row = numel // world_size // _NUM_TENSORS * _NUM_TENSORS
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    rows = torch.randn(world_size, row, device=device, generator=generator) * 1e-3
    pieces = [Piece(f"tensor{index}", row // _NUM_TENSORS, True) for index in range(_NUM_TENSORS)]
    scales = Fp8Scales(DelayedScaling())
    traffic = Traffic()
    sender = Sender([piece.name for piece in pieces], scales, WireOptions(is_blockwise), traffic)
    out = torch.empty(row, device=device)

    def fp32() -> Tensor:
        reduce_scatter(out, rows.view(-1))
        return out / world_size

    def bf16() -> Tensor:
        narrow = torch.empty(row, dtype=torch.bfloat16, device=device)
        reduce_scatter(narrow, rows.view(-1).bfloat16())
        return narrow.float() / world_size

    def fp8() -> Tensor:
        return sender.reduce(rows, pieces, group, 1 / world_size)

    exact = fp32().clone()
    error = float((fp8() - exact).norm() / exact.norm())
    # The second step on, scales are agreed.
    scales.agree([scales.tensors], device)
    one = torch.ones((), device=device)
    bits = scales.collect(device).bits
    dist.all_reduce(bits, op=dist.ReduceOp.MAX)
    scales.finish_step(bits, one * 0, one, one)

    traffic.num_bytes = 0
    error = max(error, float((fp8() - exact).norm() / exact.norm()))
    num_bytes = traffic.num_bytes
    ways: dict[str, Callable[[], Tensor]] = {"fp32": fp32, "bf16": bf16, "fp8": fp8}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first warms up
        for name, run in ways.items():
            dist.barrier()
            started = perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = torch.tensor(perf_counter() - started, device=device)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number:
                times[name].append(float(took) * 1000)
    medians = {name: median(samples) for name, samples in times.items()}
    sent = {"fp32": 4 * row * (world_size - 1), "bf16": 2 * row * (world_size - 1), "fp8": num_bytes}
    return {
        "ms": {name: round(value, 2) for name, value in medians.items()},
        "fp8 over fp32": round(medians["fp8"] / medians["fp32"], 3),
        "fp8 over bf16": round(medians["fp8"] / medians["bf16"], 3),
        "bytes": sent,
        "bytes over fp32": round(sent["fp8"] / sent["fp32"], 4),
        "bytes over bf16": round(sent["fp8"] / sent["bf16"], 4),
        "relative error": round(error, 4),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m distscale.bench.wire")
    parser.add_argument("--mib", type=int, default=64, help="of fp32 gradients on each rank")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each format")
    parser.add_argument("--granularity", choices=("tensor", "block"), default="tensor", help="what has a scale")
    arguments = parser.parse_args()
    for name in ("mib", "rounds"):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name} {value} is not allowed: a whole number, 1 or more")
    init_distributed()
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
        parser.error("nothing is sent on one rank: start two, by torchrun --nproc-per-node 2 -m distscale.bench.wire")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = measure(arguments.mib << 18, arguments.rounds, arguments.granularity == "block", device)
    if dist.get_rank() == 0:
        about = {"ranks": dist.get_world_size(), "mib": arguments.mib, "granularity": arguments.granularity}
        print(json.dumps({**about, "device": device_name(device), "commit": commit(), **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
