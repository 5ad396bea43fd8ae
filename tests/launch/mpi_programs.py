"""What the tests of MPI run under mpirun: python mpi_programs.py PROGRAM FOLDER. Each rank leaves rank-N.json there."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import distscale
from distscale.env import read_environment
from distscale.mpi import environment_from_mpi

WORLD = MPI.COMM_WORLD
VALUES = (math.inf, -math.inf, math.nan)
PLACES = ("before the averaging", "after the averaging")
FAULTS = tuple(itertools.product(PLACES, VALUES, range(4)))


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def train(reducer: distscale.Reducer) -> list[dict[str, Any]]:
    """Data parallel, the gradients averaged by MPI; each fault between two clean steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = distscale.DistributedGradScaler(
        "cpu", init_scale=2.0**40, growth_interval=2, max_norm=1.0, names=model, reducer=reducer
    )
    rows = []
    for step in range(2 * len(FAULTS) + 1):
        place, value, bad_rank = FAULTS[step // 2] if step % 2 else ("", 0.0, -1)
        data = torch.Generator().manual_seed(1000 * step + WORLD.rank)
        inputs, targets = torch.randn(32, 8, generator=data), torch.randn(32, 4, generator=data)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        grads = [param.grad for param in model.parameters()]
        if place == PLACES[0] and WORLD.rank == bad_rank:
            grads[step % 4].view(-1)[-1] = value
        for grad in grads:
            WORLD.Allreduce(MPI.IN_PLACE, grad.numpy(), MPI.SUM)
            grad /= WORLD.size
        if place == PLACES[1] and WORLD.rank == bad_rank:
            grads[step % 4].view(-1)[-1] = value
        before = digest(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        state = [optimizer.state[param] for param in model.parameters()]
        rows.append(
            {
                "report": asdict(scaler.last_step),
                "is_untouched": digest(model.parameters()) == before,
                "params": digest(model.parameters()),
                "optimizer": digest([value for of_param in state for value in of_param.values()]),
                "scaler": scaler.state_dict(),
            }
        )
    return rows


def trains() -> dict[str, Any]:
    """First without torch.distributed, then with it."""
    told = {"alone": train(distscale.MpiReducer()), "is_initialized": dist.is_initialized()}
    read = read_environment(os.environ)
    environment = distscale.init_distributed(timeout_s=60, ask_mpi=True)
    return told | {
        "read": asdict(read),
        "environment": asdict(environment),
        "again": asdict(distscale.init_distributed(timeout_s=60)),
        "mpi4py": asdict(environment_from_mpi({})),
        "mpi": train(distscale.MpiReducer()),
        "gloo": train(distscale.ProcessGroupReducer()),
        "protocol": protocol(),
    }


def protocol() -> dict[str, Any]:
    """The reducer itself, beside collectives of the program's own and in a part of the world."""
    told: dict[str, Any] = {}
    reducer = distscale.MpiReducer(timeout_s=60)
    rank, size = reducer.rank, reducer.world_size
    told["gathered"] = reducer.gather("x" * 10**rank) == ["x" * 10**peer for peer in range(size)]

    # Sums whose last bit depends on the order, and the largest and least numbers.
    draw = random.Random(rank)
    maxima = torch.tensor([rank, -rank, 2**31 - 1 if rank == 2 else -(2**31), draw.randrange(2**31)], dtype=torch.int32)
    sums = torch.tensor([draw.uniform(-1, 1) * 10.0 ** draw.randrange(-20, 20) for _ in range(500)] + [math.inf])
    sums = sums.double()
    expected = [max(column) for column in zip(*WORLD.allgather(maxima.tolist()), strict=True)]
    close = np.sum(WORLD.allgather(sums.numpy()), axis=0)
    other = WORLD.Iallreduce(MPI.IN_PLACE, np.ones(1))
    addresses = (maxima.data_ptr(), sums.data_ptr())
    reducer.reduce_(maxima, sums)
    other.Wait()
    told["maxima"] = maxima.tolist() == expected
    told["sums"] = np.allclose(sums.numpy(), close, rtol=1e-9)
    told["bits"] = digest([sums])
    told["in place"] = addresses == (maxima.data_ptr(), sums.data_ptr())

    half = distscale.MpiReducer(WORLD.Split(rank % 2))
    last = torch.tensor([rank], dtype=torch.int32)
    half.reduce_(last, None)
    told["half"] = [half.rank, half.world_size, int(last)]
    told["devices"] = [str(reducer.device(torch.device(kind))) for kind in ("cpu", "cuda")]
    told["copied"] = copy.deepcopy(half).gather(rank)
    again = pickle.loads(pickle.dumps(reducer))
    told["pickled"] = [again.rank, again.world_size, len(again.gather(0))]
    told["own"] = sentence(lambda: pickle.dumps(half))
    told["no communicator"] = sentence(lambda: distscale.MpiReducer(MPI.COMM_NULL))
    told["no time"] = sentence(lambda: distscale.MpiReducer(timeout_s=-1.0))
    return told


def sentence(call: Callable[[], Any]) -> str:
    try:
        call()
    except distscale.DistScaleError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def absent() -> dict[str, Any]:
    """Rank 1 does not come to the exchange."""
    reducer = distscale.MpiReducer(timeout_s=1.0)
    if reducer.rank == 1:
        WORLD.recv(source=0)  # never sent
    maxima = torch.zeros(3, dtype=torch.int32)
    return {"first": sentence(lambda: reducer.reduce_(maxima, None)), "then": sentence(lambda: reducer.gather(0))}


def dies() -> dict[str, Any]:
    """Rank 1 is killed before the exchange."""
    reducer = distscale.MpiReducer()
    if reducer.rank == 1:
        os.kill(os.getpid(), 9)
    reducer.reduce_(torch.zeros(3, dtype=torch.int32), None)
    return {}


def deepspeed_discovers() -> dict[str, Any]:
    """DeepSpeed's own discovery by MPI, then ours on what it left."""
    from deepspeed_import import import_deepspeed

    del os.environ["MASTER_PORT"]
    deepspeed = import_deepspeed(torch.device("cpu"))
    deepspeed.init_distributed("gloo", distributed_port=int(os.environ["FREE_PORT"]), verbose=False)
    environment = distscale.init_distributed()
    read = read_environment(os.environ)
    return {"environment": asdict(environment), "read": asdict(read), "rows": train(distscale.MpiReducer())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = globals()[sys.argv[1]]()
    (Path(sys.argv[2]) / f"rank-{WORLD.rank}.json").write_text(json.dumps(result, default=dict))
    if sys.argv[1] == "absent":
        WORLD.Abort(1)
