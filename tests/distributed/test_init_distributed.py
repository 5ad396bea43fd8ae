"""The process group that init_distributed makes, and the sentences in which it fails."""

from __future__ import annotations

import math
import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distscale
from distscale import ConfigError, ProtocolError, connect
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
        # Something listens there, and never says a word.
        os.environ["MASTER_PORT"] = str(in_use)
        told["mute"] = message(lambda: distscale.init_distributed(timeout_s=1), ProtocolError)
    os.environ["MASTER_PORT"] = str(free)
    told["no gpu"] = message(lambda: distscale.init_distributed(device="cuda"))
    told["no device"] = message(lambda: distscale.init_distributed(device="cudda"))
    told["no time"] = message(lambda: distscale.init_distributed(timeout_s=0))
    told["no end"] = message(lambda: distscale.init_distributed(timeout_s=math.inf))
    os.environ["MASTER_ADDR"] = "x" * 100
    told["no name"] = message(lambda: distscale.init_distributed())
    os.environ["MASTER_ADDR"] = "127.0.0.1"

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
        assert "timeout_s=inf must be above 0, and at most 1000000" in told["no end"]
        assert f"the address {'x' * 100!r}, where the ranks are to meet, cannot be resolved" in told["no name"]
        expected = Environment(rank, rank, 2, 2, 0, 1, "127.0.0.1", free, "variables")
        assert told["place"] == told["again"] == expected
        assert told["total"] == 3
        assert "cpu:gloo" in told["backend"]
        assert f"this is rank {rank} of 2 in it, but variables says rank {1 - rank} of 2" in told["other"]
    assert f"cannot listen at 127.0.0.1:{in_use}, since the port is in use by another program" in ranks[0]["in use"]
    for port, case in ((silent, "alone"), (in_use, "mute")):
        assert (
            f"rank 1 of 2 did not meet all others at 127.0.0.1:{port} within 1 s: rank 0 of a job without a name, 2 "
            "ranks, or torchrun for it, is to listen there, and has not come, does not answer or has ended"
        ) in ranks[1][case]


def meetings(process: int, folder: str, ports: list[int], lent_port: int) -> dict[str, str]:
    """One meeting after another, of which most fail; returns in what sentence."""
    together = dist.FileStore(f"{folder}/together", 3)
    told: dict[str, str] = {}

    def attempt(case: str, kind: type[Exception] | None, port: int, timeout_s: float, **words: object) -> None:
        os.environ.update({name: str(word) for name, word in words.items()})
        os.environ["MASTER_PORT"] = str(port)
        together.set(f"{case} {process}", "")
        together.wait([f"{case} {peer}" for peer in range(3)])
        if kind is not None:
            told[case] = message(lambda: distscale.init_distributed(timeout_s=timeout_s), kind)
            return
        distscale.init_distributed(timeout_s=timeout_s)
        total = torch.tensor(process)
        dist.all_reduce(total)
        dist.destroy_process_group()
        told[case] = str(int(total))

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # Rank 2 of step 0 never comes, and rank 1 of step 1 to the wrong place.
    step = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": process // 2, "SLURM_NTASKS": 3, "SLURM_STEP_TASKS_PER_NODE": 3}
    place = {"SLURM_PROCID": process and 1, "SLURM_LOCALID": process and 1, "SLURM_NODEID": 0}
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[variable]
    attempt("absent", ConfigError if process == 2 else ProtocolError, ports[0], 5, **step, **place)
    for variable in (*step, *place):
        del os.environ[variable]

    words = {"LOCAL_RANK": process and 1, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    attempt("twice", ConfigError, ports[1], 60, RANK=process and 1, **words)
    # torchrun's store is there in every life of the job, of three ranks on this node, and of one on each of three.
    words |= {"RANK": process, "LOCAL_RANK": process, "TORCHELASTIC_USE_AGENT_STORE": True}
    words |= {"TORCHELASTIC_RUN_ID": "run7", "TORCHELASTIC_RESTART_COUNT": 0}
    attempt("first life", None, lent_port, 60, **words)
    attempt("next life", None, lent_port, 60, TORCHELASTIC_RESTART_COUNT=1)
    words = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": process, "GROUP_WORLD_SIZE": 3}
    attempt("three nodes", None, lent_port, 60, **words)
    attempt("three nodes again", ConfigError, lent_port, 60, TORCHELASTIC_RESTART_COUNT=2 + process)
    return told


def test_who_does_not_come_and_who_comes_to_the_wrong_place_is_named(tmp_path: Path) -> None:
    lent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("", 0))
        ports = [listener.getsockname()[1] for listener in (first, second)]
    told = run_ranks(meetings, 3, str(tmp_path), ports, lent.port, init=False)
    for rank in range(2):
        assert told[rank]["absent"].startswith(
            f"rank {rank} of 3 did not meet all others at 127.0.0.1:{ports[0]} within 5 s: there is no sign of rank 2; "
        )
    assert told[2]["absent"].startswith(
        f"rank 1 of 3 came to 127.0.0.1:{ports[0]} for job 7.1, 3 ranks, but found job 7.0, 3 ranks; "
    )
    both = r"process \d+ on \S+ and process \d+ on \S+ are both rank"
    for process in range(3):
        assert re.search(f"{both} 1 of a job without a name, 3 ranks; start each rank once", told[process]["twice"])
        for case in ("first life", "next life", "three nodes"):
            assert told[process][case] == "3"
        last = told[process]["three nodes again"]
        assert re.search(f"{both} {process} of job run7, 3 ranks; with restarts on several nodes, set TORCH_DIS", last)


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
    monkeypatch.setattr(connect, "meet", lambda environment, timeout_s, is_lent: dist.HashStore())
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


@pytest.mark.parametrize(("num_nodes", "is_told"), [(1, False), (2, True)])
def test_what_to_set_if_the_nodes_do_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, is_told: bool
) -> None:
    monkeypatch.setattr(connect, "meet", lambda environment, timeout_s, is_lent: dist.HashStore())
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2 // num_nodes, "GROUP_RANK": 0}
    for variable, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    said = message(lambda: distscale.init_distributed(device="cpu"), ProtocolError)
    assert "none-such" in said  # by gloo
    assert ("GLOO_SOCKET_IFNAME" in said) == is_told


def test_a_gpu_of_its_own_that_srun_shows_a_task_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment(3, 3, 4, 4, launcher="srun")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_rank(environment) == torch.device("cpu")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert device_of_rank(environment) == torch.device("cuda", 0)
