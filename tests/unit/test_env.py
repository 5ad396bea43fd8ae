"""Who this process is, from environments that real launchers made, and from contradictory and broken ones."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distscale import ConfigError
from distscale.env import Environment, port_of_job, read_environment, torch_variables
from distscale.nodelist import expand_nodelist, tasks_of_node

# Recorded on this project's machines: of each launcher, all that it sets which says something of a place.
ALONE: dict[str, str] = {"HOME": "/root", "OMP_NUM_THREADS": "1"}
TORCHRUN = {  # torch 2.13, torchrun --nnodes 2 --nproc-per-node 2, the third rank
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "33611",
    "RANK": "2",
    "ROLE_NAME": "default",
    "ROLE_RANK": "2",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
DEEPSPEED = {  # DeepSpeed 0.19.8, deepspeed --num_gpus 2, the second rank
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "1",
    "WORLD_SIZE": "2",
}
NAMESPACE = "prterun-vm-7688@1"
OPEN_MPI = {  # 5.0.11, mpirun -n 4 on one node, the third rank
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": NAMESPACE,
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI2": "prterun-vm-7688@0.0;tcp4://127.0.0.1:56061",
}
BY_DAEMON = {"PMIX_SERVER_URI2": "prterun-vm-7688@0.1;tcp4://127.0.0.1:45937"}  # beside OPEN_MPI, on another node
HYDRA = {  # MPICH 5.0.2, mpiexec -n 2, the second rank
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
BATCH = {  # SLURM 22.05, the script of sbatch -N2 --ntasks-per-node=2
    "SLURM_JOB_ID": "20042",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2"}
SRUN = {  # srun in it, the fourth task
    **(BATCH | STEP),
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ONE_A_NODE = {  # srun --ntasks-per-node=1 in it, the second task: a torchrun, or the daemon of mpirun
    **(BATCH | STEP),
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
TWO_TASKS = {  # srun -N 1 -n 2, the second task
    **(BATCH | STEP),
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
ONE_TASK = {  # srun -n 1
    **TWO_TASKS,
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
TERMINAL = {  # the shell of srun -n 4 --pty bash
    **TWO_TASKS,
    "SLURM_GTIDS": "0,1,2,3",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "45381",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}
HANDED_ON = {  # a script submitted by sbatch -n 2 in the task of srun -n 1
    **ONE_TASK,
    "ENVIRONMENT": "BATCH",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "1",
}
NOT_ASKED_FOR = HANDED_ON | {  # by sbatch, which was told of no tasks, in the first task of srun -n 4
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}
STANDALONE = TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2"}
PMI2 = {"PMI_FD": "13", "PMI_JOBID": "20042.1", "PMI_RANK": "3", "PMI_SIZE": "4"}  # beside SRUN, by srun --mpi=pmi2


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(ALONE, Environment(), id="alone"),
        pytest.param(ALONE | {"LOCAL_RANK": "0"}, Environment(), id="alone, with a word that libraries set"),
        pytest.param(
            TORCHRUN, Environment(2, 0, 4, 2, 1, 2, "localhost", 33611, "torchrun", "run7", 0, "run7"), id="torchrun"
        ),
        pytest.param(DEEPSPEED, Environment(1, 1, 2, 2, 0, 1, "127.0.0.1", 29500, "deepspeed"), id="deepspeed"),
        pytest.param(
            OPEN_MPI,
            Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", NAMESPACE, 0, NAMESPACE),
            id="Open MPI",
        ),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_RANK": "3"},
            Environment(3, 2, 4, 3, 1, 2, None, 16217, "openmpi", NAMESPACE, 0, NAMESPACE),
            id="Open MPI on nodes that it does not name",
        ),
        pytest.param(HYDRA, Environment(1, 1, 2, 2, 0, 1, "localhost", 29500, "mpich"), id="MPICH"),
        pytest.param(SRUN, Environment(3, 1, 4, 2, 1, 2, "n1", 10042, "srun", "20042", 0, "20042.0"), id="srun"),
        pytest.param(
            SRUN | {"SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"},
            Environment(3, 1, 4, 2, 1, 2, "n1", 25880, "srun", "20042", 1, "20042.2 requeue 1"),
            id="srun, the third step of a requeued job",
        ),
        pytest.param(
            SRUN | PMI2, Environment(3, 1, 4, 2, 1, 2, "n1", 10042, "srun", "20042", 0, "20042.0"), id="srun --mpi=pmi2"
        ),
        pytest.param(BATCH, Environment(job_id="20042"), id="a batch script is alone"),
        pytest.param(
            BATCH | {"MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
            Environment(job_id="20042"),
            id="a batch script that exports where its ranks are to meet",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "20042", "SLURM_NTASKS": "4"}, Environment(job_id="20042"), id="the shell of salloc"
        ),
        pytest.param({"SLURM_NTASKS": "4"}, Environment(), id="alone, with an option of sbatch's"),
        pytest.param(ALONE | {"SLURM_RESTART_COUNT": ""}, Environment(), id="alone, with an empty count"),
        pytest.param(
            BATCH | {"SLURM_STEP_ID": "4294967290"}, Environment(job_id="20042"), id="an interactive step, too"
        ),
        pytest.param(
            ONE_A_NODE | TORCHRUN,
            Environment(2, 0, 4, 2, 1, 2, "localhost", 33611, "torchrun", "20042", 0, "run7"),
            id="torchrun in srun",
        ),
        pytest.param(
            BATCH | TORCHRUN,
            Environment(2, 0, 4, 2, 1, 2, "localhost", 33611, "torchrun", "20042", 0, "run7"),
            id="torchrun in a batch script",
        ),
        pytest.param(
            ONE_A_NODE | OPEN_MPI | BY_DAEMON,
            Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
            id="mpirun in a batch script, by a daemon that srun started",
        ),
        *(
            pytest.param(
                ONE_A_NODE | OPEN_MPI | {"PMIX_SERVER_URI2": f"prterun-{daemon};tcp4://127.0.0.1:45937"},
                Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
                id=f"the same, by the daemon {daemon}",
            )
            for daemon in ("vm-7688@0.10", "vm-7688@0.20", "vm.01-7688@0.1")
        ),
        pytest.param(
            ONE_A_NODE
            | OPEN_MPI
            | BY_DAEMON
            | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
            # Two ranks and two daemons, by chance.
            | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Environment(0, 0, 2, 2, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
            id="as many ranks as daemons, all on one node",
        ),
        pytest.param(
            BATCH | OPEN_MPI,
            Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
            id="mpirun in a batch script, on its own node",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "20042", "SLURM_NTASKS": "4"} | OPEN_MPI,
            Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
            id="salloc mpirun",
        ),
        pytest.param(
            ONE_TASK | OPEN_MPI,
            Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
            id="srun -n 1 mpirun",
        ),
        *(
            pytest.param(environ | started, expected, id=f"{launcher} {where}")
            for where, environ in {
                "in a terminal of srun's": TERMINAL,
                "in a script submitted by a task": HANDED_ON,
                "in one that says as many tasks as that task": HANDED_ON | {"SLURM_NTASKS": "1"},
                "in one that was told of no tasks": NOT_ASKED_FOR,
            }.items()
            for launcher, started, expected in (
                (
                    "mpirun",
                    OPEN_MPI,
                    Environment(2, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", "20042", 0, NAMESPACE),
                ),
                ("mpiexec of MPICH", HYDRA, Environment(1, 1, 2, 2, 0, 1, "localhost", 10042, "mpich", "20042")),
                (
                    "torchrun",
                    STANDALONE,
                    Environment(0, 0, 2, 2, 0, 1, "localhost", 33611, "torchrun", "20042", 0, "run7"),
                ),
            )
        ),
        pytest.param(HANDED_ON, Environment(job_id="20042"), id="alone in a script submitted by a task"),
        pytest.param(NOT_ASKED_FOR, Environment(job_id="20042"), id="alone in one that was told of no tasks"),
        pytest.param(
            HANDED_ON | {"SLURM_NTASKS": "1"},
            Environment(0, 0, 1, 1, 0, 1, "localhost", 10042, "srun", "20042", 0, "20042.0"),
            id="alone in one that says as many tasks as that task",
        ),
        pytest.param(
            ONE_A_NODE | HYDRA,
            Environment(1, 1, 2, 2, 0, 1, "localhost", 10042, "mpich", "20042"),
            id="mpiexec of MPICH in a batch script, by a daemon that srun started",
        ),
        pytest.param(
            # A daemon of mpirun's on every node but its own, and a torchrun on every node.
            SRUN
            | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1"}
            | OPEN_MPI
            | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
            | TORCHRUN,
            Environment(2, 0, 4, 2, 1, 2, "localhost", 33611, "torchrun", "20042", 0, "run7"),
            id="torchrun in mpirun in srun",
        ),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"},
            Environment(0, 2, 4, 4, 0, 1, "localhost", 16217, "openmpi", NAMESPACE, 0, NAMESPACE),
            id="Open MPI, which may number the ranks of a node as it likes",
        ),
        pytest.param(
            OPEN_MPI | TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            Environment(2, 0, 4, 2, 1, 2, "localhost", 33611, "torchrun", "run7", 0, "run7"),
            id="torchrun in mpirun",
        ),
        pytest.param(
            SRUN
            | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"},
            Environment(3, 1, 4, 2, 1, 2, "10.0.0.1", 1234, "srun", "20042", 0, "20042.0"),
            id="a wrapper in srun that exports torch's words",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Environment(1, 1, 2, 2, launcher="variables"),
            id="variables alone, of ranks that meet elsewhere",
        ),
        pytest.param(
            OPEN_MPI | {"MASTER_PORT": "1234", "MASTER_ADDR": "10.0.0.1"},
            Environment(2, 2, 4, 4, 0, 1, "10.0.0.1", 1234, "openmpi", NAMESPACE, 0, NAMESPACE),
            id="mpirun -x MASTER_ADDR -x MASTER_PORT",
        ),
    ],
)
def test_a_recorded_environment_is_understood(environ: dict[str, str], expected: Environment) -> None:
    assert read_environment(environ) == expected
    # Once told in torch's words it is still the same.
    if expected.launcher != "none":
        assert read_environment(environ | torch_variables(expected)) == expected


def test_restarts_of_slurm_and_of_torchrun_count() -> None:
    assert read_environment(TORCHRUN).restart_count == 0
    assert read_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).restart_count == 2
    assert read_environment(SRUN | {"SLURM_RESTART_COUNT": "1"}).restart_count == 1
    both = ONE_A_NODE | TORCHRUN | {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_environment(both).restart_count == 3


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        pytest.param(
            SRUN | {"RANK": "0", "WORLD_SIZE": "8"},
            ("on the rank of this process: RANK=0, but SLURM_PROCID=3", "WORLD_SIZE=8", "SLURM_NTASKS=4"),
            id="words of another job in srun",
        ),
        pytest.param(
            SRUN | TORCHRUN,
            ("RANK=2", "SLURM_PROCID=3", "LOCAL_WORLD_SIZE=2", "SLURM_STEP_TASKS_PER_NODE=2"),
            id="a torchrun of another job, handed on by sbatch",
        ),
        pytest.param(
            ONE_A_NODE | TORCHRUN | {"RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"},
            ("RANK=0", "SLURM_PROCID=1", "GROUP_WORLD_SIZE=1"),
            id="each torchrun of srun's alone",
        ),
        pytest.param(
            SRUN
            | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            | TORCHRUN
            | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            ("how many torchruns srun has started: GROUP_WORLD_SIZE=1, but SLURM_NTASKS=2", "--nnodes=$SLURM_NTASKS"),
            id="torchrun --standalone in each of two tasks",
        ),
        pytest.param(
            ONE_A_NODE | TORCHRUN | {"GROUP_WORLD_SIZE": "4"},
            ("GROUP_WORLD_SIZE=4, but SLURM_NTASKS=2",),
            id="more torchruns than tasks",
        ),
        pytest.param(
            ONE_A_NODE | DEEPSPEED,
            ("how many deepspeeds srun has started: CROSS_SIZE=1, but SLURM_NTASKS=2",),
            id="deepspeed in each of two tasks",
        ),
        pytest.param(
            TWO_TASKS | OPEN_MPI,
            (
                "what srun has started: SLURM_NTASKS=2, but",
                "PMIX_SERVER_URI2=prterun-vm-7688@0.0 against SLURM_PROCID=1",
            ),
            id="srun -n 2 mpirun",
        ),
        pytest.param(
            ONE_A_NODE | OPEN_MPI,
            ("by an mpirun that is one of these tasks", "OMPI_COMM_WORLD_RANK=2", "srun --ntasks=1"),
            id="mpirun in each of two nodes",
        ),
        pytest.param(
            TWO_TASKS | HYDRA,
            ("what srun has started: SLURM_STEP_TASKS_PER_NODE=2, but", "PMI_RANK=1", "against SLURM_PROCID=1"),
            id="srun -n 2 mpiexec of MPICH",
        ),
        pytest.param(
            # The variable of the terminal outlives its step.
            TERMINAL | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"} | OPEN_MPI,
            ("what srun has started: SLURM_NTASKS=4, but", "SLURM_STEP_* is left over from another step", "unset it"),
            id="srun -n 4 mpirun in a terminal of srun's",
        ),
        pytest.param(
            TERMINAL | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"} | STANDALONE,
            ("GROUP_WORLD_SIZE=1, but SLURM_NTASKS=4", "SLURM_STEP_* is left over from another step", "unset it"),
            id="srun -n 4 torchrun in a terminal of srun's",
        ),
        pytest.param(
            {"SLURM_PTY_PORT": "45381", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"} | STANDALONE | {"RANK": "2"},
            ("RANK=2 must be below WORLD_SIZE=2",),
            id="a terminal of no rank",
        ),
        pytest.param(
            HANDED_ON | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            ("how many tasks srun has started: SLURM_NTASKS=4, but SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_* is left"),
            id="a script submitted by a task that was alone on its node, but not in all",
        ),
        pytest.param(
            HANDED_ON | {"SLURM_PROCID": "1"},
            ("SLURM_NTASKS=2, but SLURM_STEP_NUM_TASKS=1",),
            id="a second task of a step of one",
        ),
        pytest.param(
            {name: value for name, value in HANDED_ON.items() if name != "SLURM_JOB_ID"},
            ("SLURM_NTASKS=2, but SLURM_STEP_NUM_TASKS=1",),
            id="a script of no job",
        ),
        pytest.param(
            {name: value for name, value in NOT_ASKED_FOR.items() if name != "SLURM_PROCID"},
            ("half set", "no SLURM_PROCID"),
            id="half a script",
        ),
        pytest.param(OPEN_MPI | HYDRA, ("OMPI_COMM_WORLD_RANK=2", "PMI_RANK=1", "PMI_SIZE=2"), id="two mpiruns"),
        pytest.param(SRUN | PMI2 | {"PMI_RANK": "1"}, ("PMI_RANK=1", "SLURM_PROCID=3"), id="srun and its PMI"),
        pytest.param(OPEN_MPI | {"LOCAL_RANK": "1"}, ("LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_RANK=2"), id="local rank"),
        pytest.param(ALONE | {"LOCAL_RANK": "1"}, ("LOCAL_RANK=1", "no launcher"), id="a local rank of nobody"),
        pytest.param(ALONE | {"GROUP_RANK": "1"}, ("GROUP_RANK=1", "no launcher"), id="a node of nobody"),
        pytest.param(
            {"MASTER_ADDR": "n1", "MASTER_PORT": "1234"},
            ("half set: there is MASTER_ADDR=n1, MASTER_PORT=1234, but no RANK and WORLD_SIZE",),
            id="a place to meet, and no rank",
        ),
        pytest.param({"MASTER_PORT": "1234"}, ("MASTER_PORT=1234, but no RANK",), id="half a place to meet"),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"},
            ("SLURM_PROCID=1", "but no SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_ID"),
            id="a task of no step",
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            ("SLURM_PROCID=0", "but no SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_ID"),
            id="the first task of no step and no job",
        ),
        pytest.param({"SLURM_STEP_ID": "0"}, ("there is SLURM_STEP_ID=0, but no SLURM_PROCID",), id="a step alone"),
        pytest.param(SRUN | {"SLURM_STEP_ID": ""}, ("SLURM_STEP_ID='' is not a number",), id="an empty step"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "run7"}, ("TORCHELASTIC_RUN_ID=run7, but no RANK",), id="a torchrun without ranks"
        ),
        pytest.param({"RANK": "0"}, ("RANK=0", "no WORLD_SIZE and LOCAL_RANK and LOCAL_WORLD_SIZE"), id="a rank alone"),
        pytest.param({"WORLD_SIZE": "4"}, ("WORLD_SIZE=4", "half set", "no RANK"), id="a world alone"),
        pytest.param(PMI2, ("PMI_RANK=3", "no MPI_LOCALRANKID and MPI_LOCALNRANKS"), id="half of PMI"),
        pytest.param({"OMPI_COMM_WORLD_RANK": "0"}, ("no OMPI_COMM_WORLD_SIZE",), id="half of Open MPI"),
        pytest.param(
            {name: value for name, value in SRUN.items() if name != "SLURM_STEP_TASKS_PER_NODE"},
            ("half set", "no SLURM_STEP_TASKS_PER_NODE"),
            id="half of srun",
        ),
        pytest.param(
            {name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"},
            ("MASTER_ADDR=localhost", "no MASTER_PORT"),
            id="an address without a port",
        ),
        pytest.param(TORCHRUN | {"RANK": "4"}, ("RANK=4 must be below WORLD_SIZE=4",), id="rank too high"),
        pytest.param(
            TORCHRUN | {"LOCAL_RANK": "2"}, ("LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2",), id="local rank"
        ),
        pytest.param(TORCHRUN | {"GROUP_RANK": "2"}, ("GROUP_RANK=2 must be below GROUP_WORLD_SIZE=2",), id="node"),
        pytest.param(
            DEEPSPEED | {"LOCAL_SIZE": "3"}, ("LOCAL_SIZE=3 must be at most WORLD_SIZE=2",), id="more here than in all"
        ),
        pytest.param(
            TORCHRUN | {"GROUP_RANK": "8", "GROUP_WORLD_SIZE": "9"},
            ("WORLD_SIZE=4 and LOCAL_WORLD_SIZE=2 leave 2 ranks for other nodes, but GROUP_WORLD_SIZE=9 says",),
            id="more nodes than ranks",
        ),
        pytest.param(
            TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            ("leave 2 ranks for other nodes, but GROUP_WORLD_SIZE=1 says that there are 0 of these",),
            id="one node, and ranks elsewhere",
        ),
        pytest.param(
            TORCHRUN | {"RANK": "0", "LOCAL_RANK": "1"},
            ("RANK=0 cannot be LOCAL_RANK=1 on its node",),
            id="the first of all, not the first on its node",
        ),
        pytest.param(
            TORCHRUN | {"RANK": "3"}, ("RANK=3 cannot be LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2"), id="the last of all"
        ),
        pytest.param(
            TORCHRUN | {"RANK": "1" * 5000}, ("RANK='1111", "is not a number"), id="more digits than int takes"
        ),
        pytest.param(TORCHRUN | {"RANK": "-1"}, ("RANK='-1' is not a number",), id="a negative rank"),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "four"}, ("WORLD_SIZE='four' is not a number",), id="a word"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "70000"}, ("MASTER_PORT=70000 is no TCP port",), id="a port"),
        pytest.param(SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, ("'n[1-' is not of SLURM's form",), id="a list of nodes"),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2"}, ("lists 1 nodes", "SLURM_NODEID=1"), id="too few nodes"
        ),
        pytest.param(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x2"}, ("not of SLURM's form",), id="a list of tasks"),
    ],
)
def test_contradictions_and_half_an_environment_are_errors_that_show_it(
    environ: dict[str, str], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        read_environment(environ)
    for part in parts:
        assert part in str(error.value)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(0, 10**7),
    st.sampled_from(("srun", "torchrun", "openmpi", "mpich")),
)
def test_ranks_of_any_job_are_told_apart_and_meet_in_one_place(counts: list[int], job: int, launcher: str) -> None:
    if launcher != "srun":
        counts = [counts[0]] * len(counts)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    read = []
    for rank, (node, local) in enumerate(places):
        numbers = (rank, len(places), local, counts[node], node, len(counts))
        match launcher:
            case "srun":
                names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "_", "SLURM_NODEID", "SLURM_STEP_NUM_NODES")
                more = {
                    "SLURM_STEP_ID": "1",
                    "SLURM_STEP_TASKS_PER_NODE": _short(counts),
                    "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
                }
            case "torchrun":
                names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
                more = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
            case "openmpi":
                words = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
                names = (*(f"OMPI_COMM_WORLD_{word}" for word in words), "_", "_")
                more = {"MASTER_ADDR": "n1"}
            case _:
                names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "_", "_")
                more = {"MASTER_ADDR": "n1"}
        more["SLURM_JOB_ID"] = str(job)
        read.append(read_environment(dict(zip(names, map(str, numbers), strict=True)) | more))
        assert read[-1].launcher == launcher
    assert [(e.rank, e.node, e.local_rank, e.local_world_size) for e in read] == [
        (rank, node, local, counts[node]) for rank, (node, local) in enumerate(places)
    ]
    assert {(e.world_size, e.num_nodes, e.job_id) for e in read} == {(len(places), len(counts), str(job))}
    (meeting,) = {(e.head_address, e.port) for e in read}
    assert meeting[0] in ("n1", "localhost")
    assert meeting[1] == (1234 if launcher == "torchrun" else port_of_job(str(job), launcher == "srun"))
    assert 10000 <= port_of_job(str(job), 1) < 30000


@given(st.integers(0, 10**7))
def test_steps_of_a_job_and_its_neighbours_have_ports_of_their_own(job: int) -> None:
    ports = {port_of_job(str(job + later), step) for later in range(50) for step in range(50)}
    assert len(ports) == 50 * 50
    # As the batch scripts calculate it.
    assert port_of_job(str(job)) == 10000 + job % 20000


@pytest.mark.parametrize("job", ["", "run7", "\u0663", "9" * 5000, "\udc80"])
def test_any_id_has_a_port(job: str) -> None:
    assert 10000 <= port_of_job(job) < 30000


def _short(counts: list[int]) -> str:
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)


@pytest.mark.parametrize("numbers", ["0-999999999", "1" * 5000])
def test_a_list_of_more_nodes_than_there_are_is_refused(numbers: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        expand_nodelist(f"n[{numbers}]")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_tasks_of_each_node_come_back(counts: list[int]) -> None:
    assert [tasks_of_node(_short(counts), node) for node in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("a,b[7]", ["a", "b7"]),
        ("r[1-2]n[3-4].site", ["r1n3.site", "r1n4.site", "r2n3.site", "r2n4.site"]),
        ("gpu-a[099-101]", ["gpu-a099", "gpu-a100", "gpu-a101"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_a_list_of_nodes_is_expanded_as_scontrol_does(nodelist: str, names: list[str]) -> None:
    assert expand_nodelist(nodelist) == names


@pytest.mark.parametrize(
    "nodelist", ["", "n[", "n[]", "n[3-1]", "n[a-b]", "n[1-2]]", "a,,b", ",a", "a,", "n[1-2-3]", "n[\u0663]"]
)
def test_what_is_no_list_of_nodes_is_refused(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        expand_nodelist(nodelist)


def test_reading_imports_neither_mpi_nor_slurm() -> None:
    program = (
        "import sys, distscale, distscale.env; sys.exit('mpi4py' in sys.modules or 'distscale.mpi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
