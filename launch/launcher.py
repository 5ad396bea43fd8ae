"""What started this process: torchrun, the deepspeed launcher or mpirun, each with words of its own."""

from __future__ import annotations

import os

import torch

from deepspeed_import import import_deepspeed
from distscale import ConfigError

__all__ = ["adopt_place", "call_of_launcher", "find_peers"]

# torchrun's variable, and what stands for it with the deepspeed launcher and with Open MPI.
OTHER_WORDS = {
    "RANK": ("OMPI_COMM_WORLD_RANK",),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE",),
    "LOCAL_WORLD_SIZE": ("LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}
DEFAULT_PORT = 29500


def adopt_place() -> None:
    """Says this process's place in torchrun's variables, whoever started it. Collective: no."""
    for variable, others in OTHER_WORDS.items():
        for other in others:
            if other in os.environ:
                os.environ.setdefault(variable, os.environ[other])


def find_peers(device: torch.device) -> None:
    """Under mpirun, which gives no address to meet at, has DeepSpeed agree on one by MPI. Collective: yes, there.

    The port is ``MASTER_PORT``, else torch's usual 29500.

    Raises:
        ConfigError: if DeepSpeed or mpi4py is missing.
    """
    if "RANK" not in os.environ or "MASTER_ADDR" in os.environ:
        return
    try:
        from mpi4py import MPI

        deepspeed = import_deepspeed(device)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"under mpirun the ranks find each other by {missing.name}, which is not installed: "
            "pip install 'distscale[deepspeed,mpi]'"
        ) from None
    deepspeed.comm.mpi_discovery(int(os.environ.get("MASTER_PORT", DEFAULT_PORT)), verbose=False)
    # That was all, and mpirun takes a process that ends without this for one that has crashed.
    MPI.Finalize()


def call_of_launcher(program: str, world_size: int) -> str:
    """The words that start ``program`` again in the way in which it was started, on one machine."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return f"mpirun -n {world_size} python {program}"
    if "LOCAL_SIZE" in os.environ:
        return f"deepspeed --num_gpus {world_size} {program}"
    return f"torchrun --standalone --nproc-per-node {world_size} {program}"
