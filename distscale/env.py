"""Which rank of which job this process is, whoever started it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from distscale.errors import ConfigError
from distscale.launchers import NEEDED, Word, claims_of, half_set, innermost, is_batch_script, number
from distscale.nodelist import expand_nodelist

__all__ = ["Environment", "port_of_job", "read_environment", "torch_variables"]

DEFAULT_PORT = 29500
"""torch's own, for a launcher that names no job."""
# Below Linux's ephemeral ports, which begin at 32768 and may be taken by any connection.
FIRST_PORT, NUM_PORTS = 10000, 20000
# Prime to NUM_PORTS, and far apart, since jobs that run at the same time have ids that are close to each other.
PORTS_APART = 7919
_SAY_WHERE = ("torchrun", "deepspeed", "variables")


@dataclass(frozen=True)
class Environment:
    """This process among the ranks of its job; the defaults are those of a process that is alone."""

    rank: int = 0
    """0 to world_size - 1."""
    local_rank: int = 0
    """0 to local_world_size - 1, on this node."""
    world_size: int = 1
    """Ranks of the job."""
    local_world_size: int = 1
    """Ranks of the job on this node."""
    node: int = 0
    """0 to num_nodes - 1. mpirun does not say; under it ranks are taken to be numbered node by node."""
    num_nodes: int = 1
    """Nodes of the job. mpirun does not say; under it all are taken to have as many ranks as this."""
    head_address: str | None = None
    """Where the ranks meet, a host name or IP address; None if the launcher does not say."""
    port: int | None = None
    """TCP port at ``head_address``; None if the launcher does not say."""
    launcher: str = "none"
    """torchrun, deepspeed, variables, openmpi, mpich, srun, mpi4py or none."""
    job_id: str = ""
    """SLURM's, else torchrun's or Open MPI's; "" if there is none."""
    restart_count: int = 0
    """SLURM's requeues and torchrun's restarts together: 0 in the first life of a job.

    With several torchruns each counts the failures of its own ranks, so it may differ from node to node.
    """
    meeting_id: str = ""
    """What the launcher calls these ranks; those with different ones do not meet. "" if it has no name for them.

    Of srun the job and the step (``20042.1``, and ``20042.1 requeue 2``), of torchrun the run id, of Open MPI the
    namespace.
    """


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Returns what ``environ`` says of this process; one of which nobody says anything is alone.

    Whose word counts is written in :mod:`distscale.launchers`. ``MASTER_ADDR`` and ``MASTER_PORT`` say where the ranks
    meet, under every launcher. Without them that is "localhost" if there is one node, and under srun the first of
    ``SLURM_STEP_NODELIST``; the port is made from the ids of job and step, see :func:`port_of_job`.

    Pure. Collective: no.

    Raises:
        ConfigError: if two sources contradict each other, or one says but half; it has variables and values of both.
    """
    launcher, words = innermost(claims_of(environ))
    place = {field: number(words[field]) for field in (*NEEDED, "node", "num_nodes") if field in words}
    _check_numbers(launcher, place, words)
    world_size, local_world_size = place["world_size"], place["local_world_size"]
    # Scripts hand on an empty one when there is none.
    requeues, restarts = (
        number(Word(name, environ.get(name) or "0")) for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    )
    job_id = _first(environ, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
    meeting_id = ""
    if launcher == "srun":
        meeting_id = f"{job_id}.{number(words['step'])}" + f" requeue {requeues}" * (requeues > 0)
    elif name := {"torchrun": "TORCHELASTIC_RUN_ID", "openmpi": "PMIX_NAMESPACE"}.get(launcher):
        meeting_id = environ.get(name, "")
    environment = Environment(
        rank=place["rank"],
        local_rank=place["local_rank"],
        world_size=world_size,
        local_world_size=local_world_size,
        node=place.get("node", place["rank"] // local_world_size),
        num_nodes=place.get("num_nodes", -(-world_size // local_world_size)),
        launcher=launcher,
        job_id=job_id,
        restart_count=requeues + restarts,
        meeting_id=meeting_id,
    )
    return _with_meeting_point(environment, environ, number(words["step"]) if launcher == "srun" else 0)


def port_of_job(job_id: str, step: int = 0) -> int:
    """Returns 10000 + (``job_id`` + 7919 * ``step``) % 20000, with the CRC-32 of an id that is no number.

    The batch scripts calculate that of step 0 by themselves.
    """
    is_number = job_id.isascii() and job_id.isdecimal() and len(job_id) < 20
    job = int(job_id) if is_number else zlib.crc32(job_id.encode(errors="surrogateescape"))
    return FIRST_PORT + (job + PORTS_APART * step) % NUM_PORTS


def torch_variables(environment: Environment) -> dict[str, str]:
    """Returns it in torchrun's variables, for libraries that know no others."""
    variables: dict[str, object] = {
        "RANK": environment.rank,
        "LOCAL_RANK": environment.local_rank,
        "WORLD_SIZE": environment.world_size,
        "LOCAL_WORLD_SIZE": environment.local_world_size,
        "MASTER_ADDR": environment.head_address,
        "MASTER_PORT": environment.port,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def _check_numbers(launcher: str, place: Mapping[str, int], words: Mapping[str, Word]) -> None:
    """Raises ConfigError if no job can have such numbers."""
    for index, count in (("rank", "world_size"), ("local_rank", "local_world_size"), ("node", "num_nodes")):
        if place.get(index, 0) >= place.get(count, 1 + place.get(index, 0)):
            raise ConfigError(f"{words[index]} must be below {words[count]}; set both anew")
    world_size, local_world_size = place["world_size"], place["local_world_size"]
    if local_world_size > world_size:
        raise ConfigError(
            f"{words['local_world_size']} must be at most {words['world_size']}, of which it is a part; set both anew"
        )
    elsewhere = world_size - local_world_size
    if "num_nodes" in place:
        num_others = place["num_nodes"] - 1
        if num_others > elsewhere or (num_others == 0 and elsewhere > 0):
            raise ConfigError(
                f"{words['world_size']} and {words['local_world_size']} leave {elsewhere} ranks for other nodes, but "
                f"{words['num_nodes']} says that there are {num_others} of these; set them anew"
            )
    # mpirun may number the ranks of a node in another order.
    is_in_order = place["local_rank"] <= place["rank"] <= place["local_rank"] + elsewhere
    if not is_in_order and launcher not in ("openmpi", "mpich"):
        raise ConfigError(
            f"{words['rank']} cannot be {words['local_rank']} on its node, where {words['local_world_size']} of "
            f"{words['world_size']} are numbered in the order of their ranks; set them anew"
        )


def _with_meeting_point(environment: Environment, environ: Mapping[str, str], step: int) -> Environment:
    """Adds where the ranks meet."""
    launcher = environment.launcher
    given = {name: Word(name, environ[name]) for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    if launcher == "none":
        # A batch script exports them for the ranks that it starts.
        if given and not is_batch_script(environ):
            raise half_set(given.values(), ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
        return environment
    if launcher in _SAY_WHERE and len(given) == 1:
        raise half_set(given.values(), ["MASTER_ADDR" if "MASTER_PORT" in given else "MASTER_PORT"])
    address = given["MASTER_ADDR"].value if "MASTER_ADDR" in given else None
    port = number(given["MASTER_PORT"]) if "MASTER_PORT" in given else None
    if port is not None and not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT={port} is no TCP port; set one between 1024 and 65535, or unset it")
    if launcher not in _SAY_WHERE:
        # Several mpiruns in one job of SLURM's are several jobs of Open MPI's.
        job = environ.get("PMIX_NAMESPACE") if launcher == "openmpi" else None
        job = job or environment.job_id
        port = port or (port_of_job(job, step) if job else DEFAULT_PORT)
        address = address or _derived_address(environment, environ)
    return replace(environment, head_address=address, port=port)


def _derived_address(environment: Environment, environ: Mapping[str, str]) -> str | None:
    if environment.num_nodes == 1:
        return "localhost"
    nodes = _first(environ, "SLURM_STEP_NODELIST") if environment.launcher == "srun" else ""
    return expand_nodelist(nodes)[0] if nodes else None


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
