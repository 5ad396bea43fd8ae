"""Which job a process is of, by the names that last over the restarts of a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["names_of_job"]

_RESTARTS = {"SLURM_JOB_ID": "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT"}
# What torchrun calls every job on several nodes that was given no --rdzv-id.
_NAMELESS = "none"


def names_of_job(environ: Mapping[str, str], restarted: bool = False) -> frozenset[str]:
    """Returns the names of the job of a rank, as ``VARIABLE=value``. Pure.

    Args:
        environ: of the rank.
        restarted: only those by which its launcher has started it again: a torchrun that starts its ranks again knows
            nothing of what else ran in the same job of SLURM, while a requeue brings back all of that job.
    """
    names = set()
    for variable, count in _RESTARTS.items():
        name = environ.get(variable)
        if variable == "TORCHELASTIC_RUN_ID" and name == _NAMELESS:
            # Its folder for errors has a random name, other than that of any other job.
            variable = "TORCHELASTIC_ERROR_FILE"
            folders = Path(environ.get(variable, "")).parents
            name = folders[2].name if len(folders) > 2 else None
        if name and (not restarted or environ.get(count, "0").strip() not in ("", "0")):
            names.add(f"{variable}={name}")
    return frozenset(names)
