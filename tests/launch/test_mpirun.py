"""MPI under the real mpirun: the exchange of a step, the process group of its ranks, and the pretraining program."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi_programs import FAULTS, PLACES
from test_pretrain import LASTING, NUM_STEPS, descendants, finished, folder, record, start
from test_pretrain_deepspeed import MPIRUN, free_port

import distscale
from checkpoints import checkpoints_of
from distscale import ConfigError
from distscale.env import Environment, port_of_job

__all__ = ["finished", "folder", "start"]  # fixtures

ROOT = Path(__file__).parents[2]
PROGRAMS = str(Path(__file__).with_name("mpi_programs.py"))
WRAPPER = [str(ROOT / "launch" / "mpirun.sh")]
DEADLINE_S = 200.0
pytestmark = pytest.mark.timeout(240)


def run(program: str, world_size: int, folder: Path, **environ: str) -> tuple[list[dict[str, Any]], int, str]:
    """Returns what each rank has left, the exit code of mpirun, and what it printed."""
    folder.mkdir()
    path = os.pathsep.join((str(ROOT / "launch"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [*MPIRUN[:-1], str(world_size), sys.executable, "-W", "error::UserWarning", PROGRAMS, program, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    files = [folder / f"rank-{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) for file in files if file.exists()], done.returncode, done.stdout


def text(value: Any) -> str:
    """In which NaN equals NaN."""
    return json.dumps(value)


def check_training(ranks: list[list[dict[str, Any]]]) -> None:
    """Every fault skipped on all four ranks alike, and nothing else."""
    for rows in zip(*ranks, strict=True):
        assert len({text(row) for row in rows}) == 1
    reports = [row["report"] for row in ranks[0]]
    faults = [reports[1 + 2 * index] for index in range(len(FAULTS))]
    for report, (place, value, bad_rank) in zip(faults, FAULTS, strict=True):
        assert report["skipped"]
        kind = "nan" if math.isnan(value) else "inf"
        assert report["culprit"]["kind"] == kind
        if place == PLACES[1]:
            assert report["culprit"]["rank"] == bad_rank
    for before, after in itertools.pairwise(ranks[0]):
        skipped = after["report"]["skipped"]
        assert after["is_untouched"] is skipped
        assert (after["params"] == before["params"]) is skipped
        assert (after["optimizer"] == before["optimizer"]) is skipped
        assert after["report"]["scale"] == before["report"]["next_scale"]
    assert not any(report["skipped"] for report in reports[::2])
    assert all(0 < report["grad_norm"] < 100 for report in reports[::2])
    assert reports[-1]["next_scale"] < 2.0**40


def test_gradients_averaged_by_mpi_are_decided_on_alike_with_and_without_torch_distributed(tmp_path: Path) -> None:
    ranks, code, output = run("trains", 4, tmp_path / "trains")
    assert code == 0, output
    assert not any(told["is_initialized"] for told in ranks)
    check_training([told["alone"] for told in ranks])
    for rank, told in enumerate(ranks):
        # The exchange by MPI is that of gloo, to the last bit.
        assert text(told["mpi"]) == text(told["gloo"]) == text(told["alone"])
        read = Environment(**told["read"])
        assert (read.rank, read.world_size, read.local_world_size, read.num_nodes) == (rank, 4, 4, 1)
        assert (read.launcher, read.head_address) == ("openmpi", "localhost")
        assert read.port == port_of_job(read.job_id)
        # Asked itself, MPI says the same, but for the port, which rank 0 finds free.
        environment = Environment(**told["environment"])
        assert environment == replace(read, port=ranks[0]["environment"]["port"])
        assert Environment(**told["again"]) == environment
        by_mpi = Environment(**told["mpi4py"])
        assert by_mpi == Environment(rank, by_mpi.local_rank, 4, 4, 0, 1, "localhost", by_mpi.port, "mpi4py")

        protocol = told["protocol"]
        assert protocol["gathered"] and protocol["maxima"] and protocol["sums"] and protocol["in place"]
        assert protocol["bits"] == ranks[0]["protocol"]["bits"]
        assert protocol["half"] == [rank // 2, 2, 2 + rank % 2]
        assert protocol["devices"] == ["cpu", "cpu"]  # this MPI library is not CUDA-aware
        assert protocol["copied"] == [rank % 2, 2 + rank % 2]
        assert protocol["pickled"] == [rank, 4, 4]
        assert protocol["own"].startswith("ConfigError: a reducer with a communicator of its own cannot be pickled")
        assert "is no communicator that this rank is in" in protocol["no communicator"]
        assert protocol["no time"] == "ConfigError: timeout_s=-1.0 must be above 0"


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    ranks, code, output = run("absent", 2, tmp_path / "absent")
    assert code != 0
    assert len(ranks) == 1, output
    assert ranks[0]["first"].startswith(
        "ProtocolError: rank 0: the exchange of a step failed: a peer did not answer within 1 s. "
    )
    assert ranks[0]["then"].startswith("ProtocolError: rank 0: the agreement on tensor names and settings cannot begin")


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    ranks, code, output = run("dies", 2, tmp_path / "dies")
    assert code != 0
    assert ranks == [], output


def test_deepspeed_with_its_own_discovery_by_mpi_is_understood(tmp_path: Path) -> None:
    # DeepSpeed asks the system for the host's address, and may get one that this machine does not route.
    environ = {"MASTER_PORT": "0", "FREE_PORT": str(free_port())}
    ranks, code, output = run("deepspeed_discovers", 2, tmp_path / "deepspeed", **environ)
    assert code == 0, output
    for rank, told in enumerate(ranks):
        assert told["environment"] == told["read"]
        environment = Environment(**told["environment"])
        assert (environment.rank, environment.world_size, environment.launcher) == (rank, 2, "openmpi")
        assert environment.port == int(environ["FREE_PORT"])
        assert text(told["rows"]) == text(ranks[0]["rows"])


def test_mpi_that_knows_of_other_ranks_than_the_launcher_is_refused() -> None:
    program = "import distscale\ntry: distscale.MpiReducer()\nexcept distscale.ConfigError as error: print(error)"
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | place, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("variables started rank 1 of 2, but to mpi4py (Open MPI v")
    assert "this is rank 0 of 1; start the ranks with the mpirun of that library" in done.stdout


def test_without_mpi4py_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"mpi4py, which is not installed: pip install 'distscale\[mpi\]'"):
        distscale.MpiReducer()


def test_the_program_under_the_wrapper_stops_also_when_that_is_killed_resumes_and_agrees_with_torchrun(
    start: Any, folder: Path, finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    run = folder / "runs" / "tiny"
    program = start([*WRAPPER, "tiny.toml"], folder)
    program.wait_for("step 3/")
    program.process.send_signal(signal.SIGUSR2)
    command = program.wait_for("to continue: ").partition("to continue: ")[2].split()
    assert program.end() == 0, program.output
    assert "stopping: the run saves after this step\n" in program.output
    assert command[:3] == [WRAPPER[0], "tiny.toml", "--resume"]
    done = max(checkpoints_of(run))
    assert 3 <= done < NUM_STEPS

    # The wrapper is killed.
    slow = "; ".join(f"slow step={step} rank=0 seconds=1" for step in range(done + 5, done + 35))
    with monkeypatch.context() as patch:
        patch.setenv("DISTSCALE_FAULTS", slow)
        program = start([*WRAPPER, "tiny.toml", "--resume"], folder)
        program.wait_for(f"step {done + 5}/")
        program.process.kill()
        program.wait_for("to continue: ")
        assert program.end() == -signal.SIGKILL
    done = max(checkpoints_of(run))

    # From another directory, by another name of the wrapper, and with a number of ranks of one's own.
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tiny.toml").symlink_to(folder / "tiny.toml")
    (elsewhere / "runs").symlink_to(folder / "runs")
    (elsewhere / "text.txt").symlink_to(folder / "text.txt")
    monkeypatch.setenv("NPROC", "2")
    relative = os.path.relpath(WRAPPER[0], elsewhere)
    program = start([relative, "tiny.toml", "--resume"], elsewhere)
    assert program.end() == 0, program.output
    assert f"resumed runs/tiny at step {done}" in program.output
    assert "2 ranks on the CPU, gloo" in program.output
    assert re.search(r"^PASS: validation loss .* ranks agree\s*$", program.output, re.M)
    for ours, theirs in zip(record(run), record(finished[0]), strict=True):
        assert {key: ours[key] for key in LASTING} == {key: theirs[key] for key in LASTING}
    # Neither do the wrappers leave anything, the killed one included.
    assert not list(folder.glob(".distscale-*"))


def test_a_second_signal_ends_ranks_that_cannot_stop_and_an_error_comes_last(
    start: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    mistaken = start([*WRAPPER, "tiny.toml", "--set", "train.warmpu=3"], folder)
    assert mistaken.end() == 2
    assert mistaken.output == "error: tiny.toml: there is no key train.warmpu; did you mean train.warmup?\n"

    program = start([*WRAPPER, "tiny.toml", "--set", "run.steps=100000", "--set", "parallel.timeout_s=5"], folder)
    program.wait_for("step 2/")
    ranks = ranks_below(program.process.pid)
    assert sorted(ranks) == [0, 1]
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    program.process.send_signal(signal.SIGINT)
    program.wait_for("stopping")
    program.process.send_signal(signal.SIGTERM)
    assert program.end() not in (0, None)
    assert not any(is_running(pid) for pid in ranks.values())

    # One rank that hangs: the other says so, mpirun ends both, and the sentence is the last line.
    program = start([*WRAPPER, "tiny.toml", "--set", "run.steps=100000", "--set", "parallel.timeout_s=5"], folder)
    program.wait_for("step 2/")
    os.kill(ranks_below(program.process.pid)[1], signal.SIGSTOP)
    assert program.end() not in (0, None)
    # mpirun wakes the silent one up to end it, and that may say so, too.
    assert re.search(r"^error: rank 0 at step \d+: .*peer", program.output, re.M)
    assert re.match(r"error: rank [01] at step \d+: .*peer", program.lines[-1]), program.output


@pytest.mark.parametrize("wrapper", ["mpirun.sh", "torchrun.sh"])
@pytest.mark.parametrize("nproc", ["abc", "0", "2x", "-1"])
def test_no_number_of_ranks_is_one_sentence_from_either_wrapper(tmp_path: Path, wrapper: str, nproc: str) -> None:
    ended = subprocess.run(
        [ROOT / "launch" / wrapper, "absent.toml"],
        cwd=tmp_path,
        env=os.environ | {"NPROC": nproc},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"error: NPROC={nproc} is no number of ranks; give a whole number from 1 on\n"


def is_running(pid: int) -> bool:
    """mpirun ends without asking how its ranks ended, so they may be zombies for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_below(pid: int) -> dict[int, int]:
    """The pid of each rank that mpirun started below ``pid``."""
    ranks = {}
    for child in descendants(pid):
        environ = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0")
        for variable in environ:
            if variable.startswith("OMPI_COMM_WORLD_RANK="):
                ranks[int(variable.partition("=")[2])] = child
    return ranks
