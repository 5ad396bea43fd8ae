"""The batch scripts under a real SLURM: a controller and two nodes on this machine."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from patience import DEADLINE_S, Patient
from test_pretrain import CONFIG, LASTING, SENTENCE, record
from test_pretrain_deepspeed import CONFIG as DEEPSPEED_CONFIG
from test_pretrain_deepspeed import shipped

from checkpoints import checkpoints_of
from distscale.slurm import render
from distscale.slurm_job import Job, Kind

ROOT = Path(__file__).parents[2]
FORKED_RANKS = str(Path(__file__).with_name("forked_ranks.py"))
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=PATH) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed here: there is no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's node daemons run as root, and this is another user"),
    pytest.mark.timeout(DEADLINE_S + 60),
]
HOST = socket.gethostname().partition(".")[0]
# Names that every machine can look up, though both are this one.
NODES = ("127.0.0.1", "127.0.0.2")
NUM_STEPS = 24
# From step 5 on a step takes a second, in the first life, so that it is not over when it is to be stopped.
SLOW = "; ".join(f"slow step={step} rank=0 seconds=1" for step in range(5, NUM_STEPS))
GOING_ON = ("PENDING", "RUNNING", "COMPLETING")
# In the second life.
KILL = "kill step=22 rank=1 restart=1"
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
FirstJobId={first_job}
KillWait=5
SchedulerParameters=sched_interval=1
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
NodeName={nodes[0]} NodeHostname={host} Port={ports[1]} CPUs=4 RealMemory=1000
NodeName={nodes[1]} NodeHostname={host} Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=test Nodes=ALL Default=YES State=UP
"""
FOLLOW = ["tail", "--quiet", "--follow=name", "--retry", "--sleep-interval=0.1", "--lines=+1"]
MUNGE_FILES = [(f"{name}-file", name) for name in ("key", "pid", "log", "seed")] + [("socket", "socket")]


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(number)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A running SLURM, and a folder that is laid out like the repository."""
    # munge wants its socket where every user could reach it, which pytest's folders are not.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o400)
    values = {"host": HOST, "folder": folder, "ports": free_ports(3), "nodes": NODES}
    # The ports of jobs follow from their number, and there may be another such cluster on this machine.
    (folder / "slurm.conf").write_text(SLURM_CONF.format(first_job=random.randrange(1, 10_000), **values))
    (folder / "slurm" / "logs").mkdir(parents=True)
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "text.txt").write_bytes(SENTENCE * 100)
    munge = [f"--{what}={folder}/munge.{name}" for what, name in MUNGE_FILES]
    daemons: list[Patient] = []

    def start(command: list[str], sign: str) -> None:
        daemons.append(Patient(command, folder))
        daemons[-1].wait_for(sign)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", PATH)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        try:
            start(["munged", "--foreground", "--force", *munge], "Created .* work threads")
            start(["slurmctld", "-D"], "Running as primary controller")
            cores = sorted(os.sched_getaffinity(0))
            for index, node in enumerate(NODES):
                # A core each: the program has a thread for each core that it sees, and sums depend on their number.
                core = str(cores[index % len(cores)])
                start(["taskset", "--cpu-list", core, "slurmd", "-D", "-N", node], "slurmd started")
            yield folder
        finally:
            for daemon in reversed(daemons):
                daemon.process.terminate()
            for daemon in reversed(daemons):
                daemon.process.wait()
                daemon.close()
            shutil.rmtree(folder)


def until(condition: Callable[[], bool], what: str) -> None:
    """Asks until it is so, for what tells nobody when it happens."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"it never came about that {what}"


class Submitted:
    """A job that was submitted, and its output as it comes."""

    def __init__(self, folder: Path, job: Job, stack: ExitStack) -> None:
        (folder / "job.sbatch").write_text(render(job))
        self.run = folder / "runs" / job.name
        submit = ["sbatch", "--parsable", "job.sbatch"]
        self.number = subprocess.run(submit, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
        stack.callback(self._close)
        name = f"{job.name}_preflight" if job.kind == "preflight" else job.name
        self.log_folder = folder / "slurm" / "logs"
        self._logs = {
            who: Patient([*FOLLOW, str(self.log_folder / f"{name}-{self.number}{who}.log")], folder)
            for who in ("", f"-{HOST}")
        }
        for log in self._logs.values():
            stack.callback(log.close)

    def says(self, pattern: str) -> str:
        """Waits for a line of the script."""
        return self._wait_for(pattern, "")

    def ranks_say(self, pattern: str) -> str:
        """Waits for a line of the ranks."""
        return self._wait_for(pattern, f"-{HOST}")

    def _wait_for(self, pattern: str, who: str) -> str:
        try:
            return self._logs[who].wait_for(pattern, lambda: self._state in GOING_ON)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._logs[''].output}") from None

    def end(self) -> None:
        """Waits for the end, which is to be a good one."""
        until(lambda: self._state not in GOING_ON, "the job has ended")
        assert self._state == "COMPLETED", "".join(log.output for log in self._logs.values())

    def hurry(self) -> None:
        """Takes away the two minutes that SLURM has a requeued job wait."""
        # Its nodes are done with it only when it does not say COMPLETING any more.
        until(lambda: self._state == "PENDING" and "Reason=BeginTime" in self._shown(), "the job is in the queue")
        # Not at once: within the second, the nodes take the new start for the one that they have just ended.
        subprocess.run(["scontrol", "update", f"JobId={self.number}", "StartTime=now+2"], check=True)

    @property
    def _state(self) -> str:
        return self._shown().partition("JobState=")[2].split()[0]

    def _shown(self) -> str:
        show = ["scontrol", "show", "job", self.number]
        return subprocess.run(show, check=True, capture_output=True, text=True).stdout

    def _close(self) -> None:
        """Ends the job, if need be, and waits until nothing of it is left."""
        if self._state in ("PENDING", "RUNNING"):
            subprocess.run(["scancel", self.number], check=True)
        until(lambda: self._state not in ("RUNNING", "COMPLETING"), "the job has ended")


def job(name: str, kind: Kind, config: str, deepspeed: str | None = None) -> Job:
    """A job on both nodes, one rank on each."""
    return Job(name, config, kind, deepspeed, partition="test", ranks_per_node=1, cpu=True)


def write_config(folder: Path, name: str, text: str = CONFIG) -> str:
    """Returns the name of a file with the config of a short run."""
    settings = {"name": f'"{name}"', "steps": NUM_STEPS, "checkpoint_every": 10, "timeout_s": 120.0}
    for key, value in settings.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.M)
    (folder / f"{name}.toml").write_text(text)
    return f"{name}.toml"


@pytest.fixture(scope="module")
def undisturbed(cluster: Path) -> list[dict[str, Any]]:
    """The record of a run that was left alone, without SLURM."""
    program = Patient([sys.executable, FORKED_RANKS, "[[0, 1]]", "2", write_config(cluster, "undisturbed")], cluster)
    try:
        assert program.end() == 0, program.output
    finally:
        program.close()
    return record(cluster / "runs" / "undisturbed")


def test_the_ranks_are_checked_together(cluster: Path) -> None:
    with ExitStack() as stack:
        checked = Submitted(cluster, job("checked", "preflight", write_config(cluster, "checked")), stack)
        checked.ranks_say("2 ranks, started by srun")
        checked.ranks_say("passed: all ranks skipped the inf planted on rank 1")
        checked.end()


def test_a_deepspeed_engine_trains(cluster: Path) -> None:
    config = write_config(cluster, "engine", DEEPSPEED_CONFIG)
    with ExitStack() as stack:
        engine = Submitted(cluster, job("engine", "torchrun", config, str(shipped("2"))), stack)
        engine.ranks_say("results are in runs/engine")
        engine.end()
        rows = record(engine.run)
        assert [row["step"] for row in rows] == list(range(NUM_STEPS))
        assert not rows[-1]["skipped"]


@pytest.mark.parametrize(("kind", "to_whom", "kill"), [("torchrun", ["--batch"], ""), ("srun", [], KILL)])
def test_a_job_is_warned_saves_is_requeued_and_ends_as_if_left_alone(
    cluster: Path,
    undisturbed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    to_whom: list[str],
    kill: str,
) -> None:
    monkeypatch.setenv("DISTSCALE_FAULTS", f"{SLOW}; {kill}")
    with ExitStack() as stack:
        warned = Submitted(cluster, job(kind, kind, write_config(cluster, kind)), stack)
        warned.ranks_say("step 5/")
        subprocess.run(["scancel", *to_whom, "--signal=USR2", warned.number], check=True)
        if to_whom:
            warned.says("stopping: the run saves after this step")
        stopped = warned.ranks_say(rf"stopped after step \d+ of {NUM_STEPS}; everything is saved")
        step = int(stopped.split()[3])
        warned.says("requeued, 1 of at most 20 times")
        warned.hurry()
        warned.ranks_say(f"resumed runs/{kind} at step {step}$")
        if kill:
            warned.ranks_say(r"error: rank 0 at step 22: .* A peer died")
            warned.says("the run failed with exit code \\d+, after a new checkpoint")
            warned.says("requeued, 2 of at most 20 times")
            warned.hurry()
            warned.ranks_say(f"resumed runs/{kind} at step 20$")
        warned.ranks_say("results are in")
        warned.end()
        rows = record(warned.run)
        for before, after in zip(undisturbed, rows, strict=True):
            assert {key: after[key] for key in LASTING} == {key: before[key] for key in LASTING}
        assert NUM_STEPS in checkpoints_of(warned.run)
        # The log of the job and those of its nodes are all that stays.
        assert len(list(warned.log_folder.glob(f"*-{warned.number}*"))) == 2
