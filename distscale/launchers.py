"""What each launcher says of a process that it started, and whose word counts.

=========  ==========================================================================================================
launcher   rank, ranks in all, rank on the node, ranks on the node
=========  ==========================================================================================================
torchrun   ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, beside ``TORCHELASTIC_RUN_ID``
deepspeed  the same, but ``LOCAL_SIZE`` for the last, beside ``CROSS_RANK``
variables  the same as torchrun's, set by somebody else
openmpi    ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``, ``OMPI_COMM_WORLD_LOCAL_RANK``, ``..._LOCAL_SIZE``
mpich      ``PMI_RANK``, ``PMI_SIZE``, ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS``: Hydra, of MPICH, Intel MPI and others
srun       ``SLURM_PROCID``, ``SLURM_NTASKS``, ``SLURM_LOCALID``, and of ``SLURM_STEP_TASKS_PER_NODE`` its node's,
           beside ``SLURM_STEP_ID``
=========  ==========================================================================================================

**Launchers nest.** srun starts one torchrun, or one daemon of mpirun, a node, and these start the ranks. So torchrun's
word outranks mpirun's, and mpirun's that of srun, which then speaks of the parent. What SLURM says of a batch script
(there is no ``SLURM_STEP_ID`` then, or none of srun's, or it is that of the task which has submitted the script) is
about the script alone, and counts for nothing.

**A parent has one task for each child.** An srun or mpirun that starts torchruns starts as many as torchrun counts. If
not, they are several jobs that each believe themselves alone (``--standalone``), or one of the two is left over from
another job, as when a rank submits a job, whose environment ``sbatch`` hands on. Which of the torchruns this is does
not count: they number themselves as they like.

**mpirun may have an srun of several tasks above its ranks,** that of its daemons, one a node. But a rank that Open
MPI's mpirun serves itself (``PMIX_SERVER_URI2``), and one of MPICH's on a node of several tasks, has no daemon above
it: each of these tasks is an mpirun, and believes itself alone.

**All else must agree.** torchrun's variables that torchrun did not set (a wrapper exported them), and the ``PMI_*``
that srun sets with ``--mpi=pmi2``, may add to what the launcher says, not contradict it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from distscale.errors import ConfigError
from distscale.nodelist import tasks_of_node

__all__ = ["NEEDED", "Word", "claims_of", "half_set", "innermost", "is_batch_script", "number"]

NEEDED = ("rank", "world_size", "local_rank", "local_world_size")
"""What must be known of a process that is not alone."""
_TORCH = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
_SLURM = {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
_VARIABLES = {
    "torchrun": _TORCH
    | {"local_world_size": "LOCAL_WORLD_SIZE", "node": "GROUP_RANK", "num_nodes": "GROUP_WORLD_SIZE"}
    | {"run": "TORCHELASTIC_RUN_ID"},
    "deepspeed": _TORCH | {"local_world_size": "LOCAL_SIZE", "node": "CROSS_RANK", "num_nodes": "CROSS_SIZE"},
    "openmpi": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "mpich": {
        "rank": "PMI_RANK",
        "world_size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_world_size": "MPI_LOCALNRANKS",
    },
    "srun": _SLURM
    | {"node": "SLURM_NODEID", "num_nodes": "SLURM_STEP_NUM_NODES", "step": "SLURM_STEP_ID"}
    | {"num_tasks": "SLURM_STEP_NUM_TASKS", "terminal": "SLURM_PTY_PORT"},
}
# URI of the process that serves a rank: NAMESPACE.NUMBER;..., where 0 is mpirun itself, and all others are daemons.
_SERVER = "PMIX_SERVER_URI2"
_COUNTS = ("world_size", "local_world_size", "num_nodes")
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
# Of a batch script all are 0.
_PLACE = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_LEFT_OVER = (
    "if that srun has not started this, SLURM_STEP_* is left over from another step, in which the job was submitted; "
    'unset it: unset "${!SLURM_STEP_@}"'
)
_MAY_BE_STARTED_BY = {
    "torchrun": ("openmpi", "mpich", "srun"),
    "deepspeed": ("openmpi", "mpich", "srun"),
    "openmpi": ("srun",),
    "mpich": ("srun",),
}
# Longer ones are none of a launcher's, and int() refuses those above 4300 digits with an error of its own.
_MAX_DIGITS = 18
# slurm.h: ids from here on are of batch scripts, interactive shells and other steps without tasks of srun's.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class Word(NamedTuple):
    """One thing that one variable says."""

    variable: str
    value: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


class Claim(NamedTuple):
    """What one launcher says of this process, by the field of ``Environment``."""

    launcher: str
    words: Mapping[str, Word]
    is_starter: bool = True
    """Whether it certainly started this process or a parent of it; if not, it must agree with whoever did."""


def claims_of(environ: Mapping[str, str]) -> list[Claim]:
    """Returns everything that is said, the launcher first that is the innermost where they nest."""
    claims = []
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ
    is_deepspeed = "CROSS_RANK" in environ and not is_torchrun
    if words := _words(environ, "deepspeed" if is_deepspeed else "torchrun"):
        launcher = "torchrun" if is_torchrun else "deepspeed" if is_deepspeed else "variables"
        claims.append(Claim(launcher, words, is_torchrun or is_deepspeed))
    if words := _words(environ, "openmpi"):
        server = environ.get(_SERVER, "").partition(";")[0]
        if server.endswith(".0"):
            words["server"] = Word(_SERVER, server)
        claims.append(Claim("openmpi", words))
    if words := _words(environ, "mpich"):
        claims.append(Claim("mpich", words, "MPI_LOCALRANKID" in environ))
    words = _words(environ, "srun")
    if words.keys() & {"rank", "local_rank", "step"} and not is_batch_script(environ):
        if "node" in words and _TASKS_PER_NODE in environ:
            tasks = tasks_of_node(environ[_TASKS_PER_NODE], number(words["node"]))
            words["local_world_size"] = Word(_TASKS_PER_NODE, str(tasks))
        claims.append(Claim("srun", words))
    return claims


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether SLURM started this process as the script or shell of a job, and not as a task of srun's."""
    if "SLURM_STEP_ID" in environ:
        step = number(Word("SLURM_STEP_ID", environ["SLURM_STEP_ID"]))
        return step >= _FIRST_SPECIAL_STEP or _is_left_over(environ)
    return "SLURM_JOB_ID" in environ and all(environ.get(name, "0") == "0" for name in _PLACE)


def _is_left_over(environ: Mapping[str, str]) -> bool:
    """Whether the step that is named is that of the task which has submitted this script.

    ``sbatch`` hands all of it on but what SLURM sets for a script, too: its place, ``SLURM_GTIDS``, the list of the
    tasks on this node, which is 0, and ``SLURM_NTASKS``, if it was asked for. srun lets the latter differ from that of
    the step with ``--preserve-env`` alone, where a step of one task is as alone as a script.
    """
    if "SLURM_JOB_ID" not in environ or any(environ.get(name) != "0" for name in _PLACE):
        return False
    if environ.get("SLURM_GTIDS") == "0" and tasks_of_node(environ.get(_TASKS_PER_NODE, "1"), 0) > 1:
        return True
    return environ.get("SLURM_STEP_NUM_TASKS") == "1" != environ.get("SLURM_NTASKS", "1")


def innermost(claims: Iterable[Claim]) -> tuple[str, dict[str, Word]]:
    """Returns the launcher that started this process, and its words with those that agree with them.

    Raises:
        ConfigError: if two contradict each other, or it does not say all that is needed.
    """
    words: dict[str, Word] = {}
    hearsay, starter, parent = "none", None, None
    for claim in claims:
        if starter is None:
            _must_agree(words, claim.words)
            words = {**claim.words, **words}
            if claim.is_starter:
                starter = claim
            elif hearsay == "none":
                hearsay = claim.launcher
        elif claim.launcher not in _MAY_BE_STARTED_BY[starter.launcher]:
            _must_agree(starter.words, claim.words)
        elif parent is None:
            parent = claim
            if not _has_terminal(parent):
                _must_have_one_task_each(starter, parent)
                _must_be_one_mpirun(starter, parent)
    launcher = hearsay if starter is None else starter.launcher
    if starter is None and not words.keys() & {"rank", "world_size"}:
        # What is said is of no use alone, such as the LOCAL_RANK=0 that some libraries set.
        numbers = dict.fromkeys((*NEEDED, "node"), "0") | dict.fromkeys(_COUNTS, "1")
        alone = {field: Word(f"no launcher, hence its {field}", text) for field, text in numbers.items()}
        _must_agree(words, alone)
        return "none", alone
    needed = (*NEEDED, "step") if launcher == "srun" else NEEDED
    if missing := [field for field in needed if field not in words]:
        names = _VARIABLES.get(launcher, _VARIABLES["torchrun"])
        raise half_set(words.values(), [names.get(field, _TASKS_PER_NODE) for field in missing])
    num_tasks = words.get("num_tasks", words["world_size"])
    if launcher == "srun" and number(num_tasks) != number(words["world_size"]):
        raise ConfigError(
            "the environment contradicts itself on how many tasks srun has started: "
            f"{words['world_size']}, but {num_tasks}; {_LEFT_OVER}"
        )
    return launcher, words


def half_set(words: Iterable[Word], lacking: Iterable[str]) -> ConfigError:
    """Returns the error for words without variables that belong to them."""
    return ConfigError(
        f"the environment of this process is half set: there is {', '.join(map(str, words))}, "
        f"but no {' and '.join(lacking)}; set all of them or none"
    )


def number(word: Word) -> int:
    """Returns the value of a variable as a number. Raises: ConfigError."""
    text = word.value.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ConfigError(f"{word.variable}={word.value[:40]!r} is not a number; set it to one, or unset it")
    return int(text)


def _words(environ: Mapping[str, str], launcher: str) -> dict[str, Word]:
    names = _VARIABLES[launcher]
    return {field: Word(name, environ[name]) for field, name in names.items() if name in environ}


def _has_terminal(claim: Claim) -> bool:
    """Whether srun gave it a terminal, which only the first task gets; what runs in there inherits the variable."""
    return "terminal" in claim.words and "rank" in claim.words and number(claim.words["rank"]) == 0


def _must_have_one_task_each(inner: Claim, outer: Claim) -> None:
    """Raises ConfigError if ``outer`` has not one task for each torchrun."""
    agents, tasks = inner.words.get("num_nodes"), outer.words.get("world_size")
    if agents is not None and tasks is not None and agents.value.strip() != tasks.value.strip():
        raise ConfigError(
            f"the environment contradicts itself on how many {inner.launcher}s {outer.launcher} has started: {agents}, "
            f"but {tasks}. There is {_listed(inner)} against {_listed(outer)}; start one in each task and tell it of "
            "all, as by torchrun --nnodes=$SLURM_NTASKS, or unset those that are left over from another job"
            f"{_hint(outer)}"
        )


def _must_be_one_mpirun(inner: Claim, outer: Claim) -> None:
    """Raises ConfigError if each of several tasks of ``outer`` is an mpirun."""
    if inner.launcher == "mpich":
        tasks = outer.words.get("local_world_size")
    else:
        tasks = outer.words.get("world_size") if "server" in inner.words else None
    if tasks is not None and number(tasks) > 1:
        raise ConfigError(
            f"the environment contradicts itself on what {outer.launcher} has started: {tasks}, but this rank was "
            f"started by an mpirun that is one of these tasks, and no daemon. There is {_listed(inner)} against "
            f"{_listed(outer)}; start one mpirun, in the batch script or by srun --ntasks=1, or none and the ranks by "
            f"srun, or unset those that are left over from another job{_hint(outer)}"
        )


def _hint(outer: Claim) -> str:
    return f"; {_LEFT_OVER}" if outer.launcher == "srun" else ""


def _listed(claim: Claim) -> str:
    return ", ".join(map(str, claim.words.values()))


def _must_agree(words: Mapping[str, Word], others: Mapping[str, Word]) -> None:
    for field, word in words.items():
        other = others.get(field, word)
        if word.value.strip() != other.value.strip():
            raise ConfigError(
                f"the environment contradicts itself on the {field} of this process: {word}, but {other}. "
                f"There is {', '.join(map(str, words.values()))} against {', '.join(map(str, others.values()))}; "
                "unset those that are left over from another job"
            )
