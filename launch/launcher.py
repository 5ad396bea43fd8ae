"""The words that start the program again in the way in which it was started."""

from __future__ import annotations

from distscale.env import Environment

__all__ = ["call_of_launcher"]


def call_of_launcher(program: str, environment: Environment) -> str:
    """Returns what to type in front of the arguments of ``program``, on one machine."""
    num_ranks = environment.world_size
    match environment.launcher:
        case "openmpi" | "mpich" | "mpi4py":
            return f"mpirun -n {num_ranks} python {program}"
        case "srun":
            return f"srun -n {num_ranks} python {program}"
        case "deepspeed":
            return f"deepspeed --num_gpus {num_ranks} {program}"
        case "none":
            return f"python {program}"
        case _:
            return f"torchrun --standalone --nproc-per-node {num_ranks} {program}"
