"""The batch scripts under a real SLURM: a controller and two nodes on this machine."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
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
from test_pretrain import CONFIG, DEADLINE_S, LASTING, SENTENCE, TORCHRUN, Program, record

from checkpoints import checkpoints_of
from distscale.slurm import Job, Kind, render

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=PATH) is None]
pytestmark = [
    pytest.mark.skipif("DISTSCALE_CLUSTER" not in os.environ, reason="starts a SLURM of its own: make cluster"),
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed here: there is no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's node daemons run as root, and this is another user"),
    pytest.mark.timeout(300),
]
# Names that every machine can look up, though both are this one.
NODES = ("127.0.0.1", "127.0.0.2")
JOB_DEADLINE_S = 150.0
NUM_STEPS = 24
HELD_STEP = 5
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
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
MUNGE_FILES = [(f"{name}-file", name) for name in ("key", "pid", "log", "seed")] + [("socket", "socket")]


class Patient(Program):
    """A program that may last as long as a job."""

    def __init__(self, command: list[str], folder: Path) -> None:
        super().__init__(command, folder)
        self._until = time.monotonic() + JOB_DEADLINE_S

    def wait_for(self, pattern: str) -> str:
        try:
            return super().wait_for(pattern)
        except queue.Empty:
            raise AssertionError(f"no line like {pattern!r} came in time:\n{self.output}") from None


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
    values = {"host": socket.gethostname().partition(".")[0], "folder": folder, "ports": free_ports(3), "nodes": NODES}
    (folder / "slurm.conf").write_text(SLURM_CONF.format(**values))
    (folder / "slurm" / "logs").mkdir(parents=True)
    (folder / "launch").symlink_to(ROOT / "launch")
    (folder / "text.txt").write_bytes(SENTENCE * 100)
    munge = [f"--{what}={folder}/munge.{name}" for what, name in MUNGE_FILES]
    daemons: list[Program] = []

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


def is_pending(number: signal.Signals, process: int) -> bool:
    """Whether a signal waits for a process that is held."""
    status = Path(f"/proc/{process}/status").read_text()
    return any(int(mask, 16) >> (number - 1) & 1 for mask in re.findall(r"^S(?:ig|hd)Pnd:\t(\w+)$", status, re.M))


class Submitted:
    """A job that was submitted, and its output as it comes."""

    def __init__(self, folder: Path, name: str, kind: Kind, stack: ExitStack, max_requeues: int = 20) -> None:
        job = Job(name, f"{name}.toml", kind, partition="test", ranks_per_node=1, cpu=True, max_requeues=max_requeues)
        (folder / f"{name}.sbatch").write_text(render(job))
        self.run = folder / "runs" / name
        submit = ["sbatch", "--parsable", f"{name}.sbatch"]
        self.number = subprocess.run(submit, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
        stack.callback(self._close)
        self.log = folder / "slurm" / "logs" / f"{name}-{self.number}.log"
        node_log = self.log.with_name(f"{name}-{self.number}-{socket.gethostname().partition('.')[0]}.log")
        self.output, self.ranks_output = (
            Patient(["tail", "--quiet", "--follow=name", "--retry", "--lines=+1", str(path)], folder)
            for path in (self.log, node_log)
        )
        stack.callback(self.output.close)
        stack.callback(self.ranks_output.close)

    def end(self) -> str:
        """Waits for the end and returns the state, such as COMPLETED."""
        self.ranks_output.wait_for("results are in")
        until(lambda: self.state not in ("RUNNING", "COMPLETING"), "the job has ended")
        return self.state

    @property
    def state(self) -> str:
        return self._scontrol("show", "job", self.number).partition("JobState=")[2].split()[0]

    def hurry(self) -> None:
        """Takes away the two minutes that SLURM has a requeued job wait."""
        until(lambda: "Reason=BeginTime" in self._scontrol("show", "job", self.number), "the job is in the queue")
        # Not at once: within the second, the nodes take the new start for the one that they have just ended.
        self._scontrol("update", f"JobId={self.number}", "StartTime=now+3")

    def _scontrol(self, *arguments: str) -> str:
        return subprocess.run(["scontrol", *arguments], check=True, capture_output=True, text=True).stdout

    def _close(self) -> None:
        """Ends the job, if need be, and waits until nothing of it is left."""
        if self.state in ("PENDING", "RUNNING"):
            for process in self.ranks():
                os.kill(process, signal.SIGKILL)
            subprocess.run(["scancel", self.number], check=True)
        until(lambda: self.state not in ("RUNNING", "COMPLETING"), "the job has ended")

    def ranks(self) -> list[int]:
        """The processes of the training program that the nodes have started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"launch/pretrain.py" in arguments[1:3] and f"SLURM_JOB_ID={self.number}".encode() in environment:
                found.append(int(process.name))
        return found


def write_config(folder: Path, name: str) -> None:
    text = CONFIG.replace('name = "tiny"', f'name = "{name}"').replace("steps = 80", f"steps = {NUM_STEPS}")
    (folder / f"{name}.toml").write_text(text)


@pytest.fixture(scope="module")
def undisturbed(cluster: Path) -> list[dict[str, Any]]:
    """The record of a run that was left alone, without SLURM."""
    write_config(cluster, "undisturbed")
    program = Program([*TORCHRUN, "undisturbed.toml"], cluster)
    try:
        assert program.end() == 0, program.output
    finally:
        program.close()
    return record(cluster / "runs" / "undisturbed")


@pytest.mark.parametrize(("kind", "to_whom"), [("torchrun", ["--batch"]), ("srun", [])])
def test_a_job_is_warned_saves_is_requeued_and_ends_as_if_left_alone(
    cluster: Path,
    undisturbed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    to_whom: list[str],
) -> None:
    write_config(cluster, kind)
    # Time to hold the ranks, which cannot come to their end then before the signal comes to them.
    monkeypatch.setenv("DISTSCALE_FAULTS", f"slow step={HELD_STEP} rank=0 seconds=3")
    with ExitStack() as stack:
        job = Submitted(cluster, kind, kind, stack)
        job.ranks_output.wait_for(f"step {HELD_STEP}/")
        ranks = job.ranks()
        assert len(ranks) == len(NODES)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        subprocess.run(["scancel", *to_whom, "--signal=USR2", job.number], check=True)
        if to_whom:
            job.output.wait_for("stopping: the run saves after this step")
        else:
            for rank in ranks:
                until(lambda rank=rank: is_pending(signal.SIGUSR2, rank), "the signal is with the rank")
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        job.ranks_output.wait_for(rf"stopped after step [67] of {NUM_STEPS}; everything is saved")
        job.output.wait_for("requeued, 1 of at most 20 times")
        job.hurry()
        job.ranks_output.wait_for(f"resumed runs/{kind} at step [67]")
        assert job.end() == "COMPLETED", job.output.output + job.ranks_output.output
        rows = record(job.run)
        for before, after in zip(undisturbed, rows, strict=True):
            assert {key: after[key] for key in LASTING} == {key: before[key] for key in LASTING}
        assert NUM_STEPS in checkpoints_of(job.run)
        # The log of the job and those of its nodes are all that stays.
        assert len(list(job.log.parent.glob(f"*-{job.number}*"))) == 2
