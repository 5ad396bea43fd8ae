"""The process group that init_distributed makes, and the sentences in which it fails."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distscale
from distscale import ConfigError, ProtocolError
from distscale.connect import device_of_rank
from distscale.env import Environment
from ranks import run_ranks


def message(call: Any, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as error:
        call()
    assert not dist.is_initialized()
    return str(error.value)


def several_attempts(rank: int, in_use: int, silent: int, free: int) -> dict[str, Any]:
    """What fails on each of two ranks, and then what does not."""
    told: dict[str, Any] = {}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(place)
    told["nowhere"] = message(lambda: distscale.init_distributed())
    os.environ.update(MASTER_ADDR="no.such.host.invalid", MASTER_PORT=str(free))
    told["no host"] = message(lambda: distscale.init_distributed())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(in_use))
    if rank == 0:
        told["in use"] = message(lambda: distscale.init_distributed(timeout_s=5))
    if rank == 1:
        os.environ["MASTER_PORT"] = str(silent)
        told["alone"] = message(lambda: distscale.init_distributed(timeout_s=1), ProtocolError)
    os.environ["MASTER_PORT"] = str(free)
    told["no gpu"] = message(lambda: distscale.init_distributed(device="cuda"))
    told["no device"] = message(lambda: distscale.init_distributed(device="cudda"))
    told["no time"] = message(lambda: distscale.init_distributed(timeout_s=0))

    first = distscale.init_distributed(timeout_s=60)
    again = distscale.init_distributed(timeout_s=60)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    told["place"], told["again"], told["total"] = first, again, int(total)
    told["backend"] = dist.get_backend_config()
    os.environ.update(RANK=str(1 - rank), LOCAL_RANK=str(1 - rank))
    with pytest.raises(ConfigError) as error:
        distscale.init_distributed()
    told["other"] = str(error.value)
    return told


def test_two_ranks_meet_once_and_are_told_in_a_sentence_what_keeps_them_from_it() -> None:
    with socket.socket() as taken, socket.socket() as unheard, socket.socket() as spare:
        for listener in (taken, unheard, spare):
            listener.bind(("", 0))
        taken.listen()
        in_use, silent, free = (listener.getsockname()[1] for listener in (taken, unheard, spare))
        spare.close()
        ranks = run_ranks(several_attempts, 2, in_use, silent, free, init=False)
    for rank, told in enumerate(ranks):
        assert "variables started 2 ranks and does not say where they meet; set MASTER_ADDR" in told["nowhere"]
        assert "'no.such.host.invalid', where the ranks are to meet, cannot be resolved" in told["no host"]
        assert f"device='cuda' was asked for on rank {rank}, one of 2 on this node, which shows it 0" in told["no gpu"]
        assert "device='cudda' is none that torch knows" in told["no device"]
        assert "timeout_s=0 must be above 0" in told["no time"]
        expected = Environment(rank, rank, 2, 2, 0, 1, "127.0.0.1", free, "variables")
        assert told["place"] == told["again"] == expected
        assert told["total"] == 3
        assert "cpu:gloo" in told["backend"]
        assert f"this is rank {rank} of 2 in it, but variables says rank {1 - rank} of 2" in told["other"]
    assert f"cannot listen at 127.0.0.1:{in_use}, since the port is in use by another program" in ranks[0]["in use"]
    assert f"rank 1 of 2 did not meet all others at 127.0.0.1:{silent} within 1 s" in ranks[1]["alone"]


def test_a_process_without_a_launcher_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    try:
        assert distscale.init_distributed() == distscale.init_distributed() == Environment()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert "RANK" not in os.environ
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("local_rank", "num_ranks", "offloading", "device", "backend"),
    [
        (3, 4, False, "cuda:3", "nccl"),
        (0, 4, True, "cuda:0", "cpu:gloo,cuda:nccl"),
        (4, 5, True, "cpu", "gloo"),  # NCCL cannot share a GPU
    ],
)
def test_the_backend_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, num_ranks: int, offloading: bool, device: str, backend: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.append((backend, options)))
    place = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    for variable, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234}.items():
        monkeypatch.setenv(variable, str(value))
    environment = distscale.init_distributed(offloading=offloading, timeout_s=7)
    assert str(device_of_rank(environment)) == device
    assert made[:-1] == ([device] if device != "cpu" else [])
    called_backend, options = made[-1]
    assert called_backend == backend
    assert options["timeout"] == timedelta(seconds=7)
    assert options.get("device_id") == (None if device == "cpu" else torch.device(device))


def test_a_gpu_of_its_own_that_srun_shows_a_task_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(3, 3, 4, 4, launcher="srun")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_rank(environment) == torch.device("cpu")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert device_of_rank(environment) == torch.device("cuda", 0)
