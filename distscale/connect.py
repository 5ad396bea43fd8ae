"""The process group of all ranks, whoever started them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distscale.env import Environment, read_environment, torch_variables
from distscale.errors import ConfigError, DistScaleError, ProtocolError
from distscale.meeting import first_line, meet

__all__ = ["DEFAULT_TIMEOUT_S", "device_of_rank", "init_distributed"]

DEFAULT_TIMEOUT_S = 1800.0
"""That of torch's gloo and, roughly, of its NCCL."""
_MAX_TIMEOUT_S = 1e6  # some of torch's clocks count milliseconds in 32 bits


def init_distributed(
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
    offloading: bool = False,
    ask_mpi: bool = False,
) -> Environment:
    """Makes the default process group of all ranks that the launcher started, and returns this process's place.

    The backend is NCCL on CUDA, where the device of this rank becomes the current one, and gloo elsewhere. A process
    that no launcher started gets a group of its own. ``os.environ`` gets torchrun's variables, for libraries that know
    no others. Called again it makes nothing, and returns the same.

    Collective: yes. Syncs host: yes.

    Args:
        timeout_s: seconds after which a collective, or this call, fails for want of a rank.
        device: of this rank's tensors; by default that of :func:`device_of_rank`. "cuda" alone is the rank's own.
        offloading: on CUDA, also reduce tensors on the CPU (gloo beside NCCL), as offloaded gradients are.
        ask_mpi: take place and meeting point from mpi4py, whatever the variables lack. Under MPI launchers this finds
            the address that mpirun does not say when there are several nodes.

    Raises:
        ConfigError: if the environment contradicts itself or is half set, there is no such device, nobody says where to
            meet, the address cannot be resolved, the port is in use, there is another job, two processes are the same
            rank, or there is another process group already.
        ProtocolError: if other ranks did not come within ``timeout_s``, which it names.
    """
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise ConfigError(f"timeout_s={timeout_s!r} must be above 0, and at most {_MAX_TIMEOUT_S:.0f}")
    if ask_mpi and not dist.is_initialized():
        from distscale.mpi import environment_from_mpi

        environment = environment_from_mpi(os.environ)
    else:
        environment = read_environment(os.environ)
    place = _checked_device(environment, device)
    backend = "gloo" if place.type != "cuda" else "cpu:gloo,cuda:nccl" if offloading else "nccl"
    if dist.is_initialized():
        _check_present_group(environment, backend)
        return environment
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if place.type == "cuda":
        options["device_id"] = place
    if environment.world_size == 1:
        # Documented, and in no __all__.
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    else:
        _check_address(environment)
    if environment.launcher != "none":
        os.environ.update(torch_variables(environment))
    try:
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if environment.world_size > 1:
            is_lent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            store = meet(environment, timeout_s, is_lent=is_lent)
            options |= {"store": store, "rank": environment.rank, "world_size": environment.world_size}
        dist.init_process_group(backend, **options)
    except DistScaleError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        across_nodes = (
            ". If the nodes cannot reach each other (a host's own name may be an address of its loopback), set "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network interface that they share"
        )
        raise ProtocolError(
            f"rank {environment.rank} of {environment.world_size} could not make the process group ({backend}, "
            f"{place}); look for the first error among the ranks{across_nodes if environment.num_nodes > 1 else ''}. "
            f"The backend said: {first_line(error)}"
        ) from error
    return environment


def device_of_rank(environment: Environment) -> torch.device:
    """Returns the GPU of this rank, or the CPU if there is not one GPU for each rank of this node.

    NCCL cannot share a GPU between ranks. Where ``srun --gpus-per-task`` shows each rank its own alone, that is it.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus and environment.launcher == "srun" and "SLURM_GPUS_PER_TASK" in os.environ:
        return torch.device("cuda", 0)
    if environment.local_world_size <= num_gpus:
        return torch.device("cuda", environment.local_rank)
    return torch.device("cpu")


def _checked_device(environment: Environment, device: torch.device | str | None) -> torch.device:
    own = device_of_rank(environment)
    if device is None:
        return own
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is none that torch knows; give 'cpu', 'cuda' or 'cuda:1'") from None
    if place.type == "cuda":
        index: int | None = place.index
        num_gpus = torch.cuda.device_count()
        if index is None and own.type == "cuda":
            return own
        if index is None or index >= num_gpus:
            raise ConfigError(
                f"device='{place}' was asked for on rank {environment.rank}, one of {environment.local_world_size} on "
                f"this node, which shows it {num_gpus} GPUs; start one rank a GPU, or pass device='cpu'"
            )
    return place


def _check_present_group(environment: Environment, backend: str) -> None:
    """Raises ConfigError if the default group is another than this call would make."""
    there = (dist.get_rank(), dist.get_world_size())
    if there != (environment.rank, environment.world_size):
        raise ConfigError(
            f"torch.distributed is initialized already, and this is rank {there[0]} of {there[1]} in it, but "
            f"{environment.launcher} says rank {environment.rank} of {environment.world_size}; "
            "make the process group once, by init_distributed() alone"
        )
    wanted = set((backend if ":" in backend else f"{'cuda' if backend == 'nccl' else 'cpu'}:{backend}").split(","))
    present = dist.get_backend_config()
    if not wanted <= set(present.split(",")):
        raise ConfigError(
            f"torch.distributed is initialized already, with {present}, but this call wants {backend}; "
            "make the process group once, by init_distributed() alone"
        )


def _check_address(environment: Environment) -> None:
    if environment.head_address is None or environment.port is None:
        raise ConfigError(
            f"{environment.launcher} started {environment.world_size} ranks and does not say where they meet; set "
            "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks, or, under mpirun, "
            "call init_distributed(ask_mpi=True)"
        )
    try:
        socket.getaddrinfo(environment.head_address, environment.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the address {environment.head_address!r}, where the ranks are to meet, cannot be resolved on "
            f"{socket.gethostname()}: {error}; set MASTER_ADDR to an address of rank 0 that all nodes know"
        ) from None
