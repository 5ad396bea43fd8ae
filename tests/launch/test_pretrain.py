"""The pretraining program under the real torchrun: it learns, stops, resumes, and says what went wrong."""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sessions import tiny_config

import pretrain
from checkpoints import checkpoints_of, damage, move_aside
from data import load_text
from distscale import ConfigError
from distscale.config import load_config
from lock import RunLock
from resume import resume_point

ROOT = Path(__file__).parents[2]
WRAPPER = [str(ROOT / "launch" / "torchrun.sh")]
PROGRAM = str(ROOT / "launch" / "pretrain.py")
# Runs a command on a terminal of its own, and passes on what is typed.
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
NUM_STEPS = 80
DEADLINE_S = 60.0
SENTENCE = b"Pack my box with five dozen liquor jugs; the quick onyx goblin jumps over the lazy dwarf.\n"
# What must be equal, to the last bit, however often a run was stopped.
LASTING = ("step", "skipped", "scale", "next_scale", "grad_norm", "clip_coef", "culprit", "loss", "lr", "applied")
CONFIG = tiny_config(
    NUM_STEPS,
    """
eval_every = 50
checkpoint_every = 25
profile_every = 30
log_every = 1
[parallel]
timeout_s = 30.0
[scaler]
init_scale = 16777216.0
growth_interval = 20
max_norm = 1.0
""",
)


class Program:
    """A started program: its lines as they come, and its end."""

    def __init__(self, command: list[str], folder: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._coming: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._until = time.monotonic() + DEADLINE_S

    def wait_for(self, pattern: str) -> str:
        """Returns the next line with ``pattern``."""
        while (line := self._coming.get(timeout=max(0.0, self._until - time.monotonic()))) is not None:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"the program ended without a line like {pattern!r}:\n{self.output}")

    def end(self) -> int:
        """Waits for the end and returns the exit code."""
        code = self.process.wait(timeout=max(0.0, self._until - time.monotonic()))
        self._reader.join()
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def close(self) -> None:
        """Ends whatever of it is left."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            if self.process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._coming.put(line)
        self._coming.put(None)


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` and its children have started, deepest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found = [*found, *descendants(child), child]
    return found


def workers(pid: int) -> dict[int, int]:
    """The pid of each rank below ``pid``."""
    ranks = {}
    for child in descendants(pid):
        environment = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0")
        for variable in environment:
            if variable.startswith("RANK="):
                ranks[int(variable.removeprefix("RANK="))] = child
    return ranks


@pytest.fixture
def start() -> Iterator[Any]:
    programs: list[Program] = []

    def start_program(command: list[str], folder: Path) -> Program:
        programs.append(Program(command, folder))
        return programs[-1]

    yield start_program
    for program in programs:
        program.close()


def prepare(folder: Path) -> Path:
    (folder / "text.txt").write_bytes(SENTENCE * 100)
    (folder / "tiny.toml").write_text(CONFIG, encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run that was left alone, the same in every module."""
    folder = tmp_path_factory.getbasetemp() / "finished"
    output = folder / "output.txt"
    if not folder.exists():
        folder.mkdir()
        program = Program([*WRAPPER, "tiny.toml"], prepare(folder))
        try:
            assert program.end() == 0, program.output
        finally:
            program.close()
        output.write_text(program.output)
    return folder / "runs" / "tiny", output.read_text()


def record(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_a_run_learns_explains_its_skips_and_leaves_its_results(finished: tuple[Path, str]) -> None:
    run, output = finished
    rows = record(run)
    summary = json.loads((run / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    skips = [row for row in rows if row["skipped"]]
    assert skips[0]["step"] == 0
    assert skips[0]["scale"] == 2.0**24
    assert all(row["culprit"]["kind"] in ("inf", "nan") and row["culprit"]["rank"] in (0, 1) for row in skips)
    assert all(row["next_scale"] == row["scale"] / 2 for row in skips)
    assert any(row["next_scale"] == 2 * row["scale"] for row in rows), "the scale never grew again"
    assert all(after["scale"] == before["next_scale"] for before, after in itertools.pairwise(rows))
    # The learning rate follows the applied steps alone.
    assert [row["applied"] for row in rows] == [sum(not r["skipped"] for r in rows[:n]) for n in range(NUM_STEPS)]

    assert summary["num_skips"] == len(skips)
    assert [skip["culprit"] for skip in summary["skips"]] == [row["culprit"] for row in skips]
    assert summary["scale"] == rows[-1]["next_scale"]
    assert math.isclose(summary["train_loss"], sum(row["loss"] for row in rows[-20:]) / 20)
    assert summary["validation_loss"] < summary["unigram_entropy"] / 2
    assert summary["comparison"] is None
    assert 0 < summary["exchange_share"] < summary["scaler_share"] < 1
    assert summary["gradients"]["e4m3"]["lost"][1] > summary["gradients"]["fp16"]["lost"][1]

    assert list(checkpoints_of(run)) == [75, NUM_STEPS]
    resolved = tomllib.loads((run / "config.toml").read_text())
    assert resolved["train"]["betas"] == [0.9, 0.95]
    assert resolved["run"]["steps"] == NUM_STEPS
    assert re.search(rf"^PASS: validation loss .* {len(skips)} skips, all explained; ranks agree$", output, re.M)
    assert "run with --compare" in output
    assert "Traceback" not in output


def test_a_stopped_run_resumes_as_if_it_had_not_been_stopped(
    start: Any, folder: Path, finished: tuple[Path, str]
) -> None:
    undisturbed = record(finished[0])
    run = folder / "runs" / "tiny"
    # Stopped while every step so far has overflowed.
    program = start([*WRAPPER, "tiny.toml"], folder)
    program.wait_for("step 3/")
    for _ in range(2):  # SLURM's warning, which never ends a run at once
        program.process.send_signal(signal.SIGUSR2)
    command = program.wait_for("to continue: ").partition("to continue: ")[2].split()
    assert program.end() == 0, program.output
    assert command[1:] == ["tiny.toml", "--resume"]
    done = len(record(run))
    # Under load it may have passed a regular checkpoint before the stop was asked for.
    assert list(checkpoints_of(run))[-1] == done
    assert 3 <= done < NUM_STEPS
    assert not (run / "summary.json").exists()
    assert all(row["skipped"] for row in undisturbed[:3])

    # A crash may leave half a line and half a checkpoint behind.
    with (run / "steps.jsonl").open("a") as file:
        file.write('{"step": 999, "skipp')
    (run / "checkpoints" / "step_79").mkdir()
    program = start([*command, "--compare"], folder)
    assert program.end() == 0, program.output
    rows = record(run)
    for before, after in zip(undisturbed, rows, strict=True):
        assert {key: after[key] for key in LASTING} == {key: before[key] for key in LASTING}
    expected = json.loads((finished[0] / "summary.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    timings = ("step_time_s", "scaler_share", "exchange_share", "comparison")
    for key in expected.keys() - timings:
        assert summary[key] == expected[key], key

    # The comparison is the same run with another precision alone.
    comparison = summary["comparison"]
    assert list(comparison) == ["FP32", "FP16 without a scale"]
    for name, result in comparison.items():
        other = record(run / "compare" / name.lower().replace(" ", "_"))
        assert {row["scale"] for row in other} == {1.0}
        assert math.isclose(other[0]["loss"], undisturbed[0]["loss"], rel_tol=1e-3)
        assert result["validation_loss"] < summary["unigram_entropy"] / 2
    assert comparison["FP32"]["validation_loss"] != comparison["FP16 without a scale"]["validation_loss"]


def test_ctrl_c_on_a_terminal_lets_make_succeed(start: Any, folder: Path) -> None:
    (folder / "Makefile").write_text(f"pretrain:\n\texec {WRAPPER[0]} tiny.toml --set run.steps=100000\n")
    program = start([sys.executable, "-c", ON_A_TERMINAL, "make", "pretrain"], folder)
    program.wait_for("step 2: skipped")
    program.process.stdin.write("\x03")
    program.process.stdin.flush()
    program.wait_for("to continue: ")
    assert program.end() == 0, program.output
    assert len(checkpoints_of(folder / "runs" / "tiny")) == 1


def test_a_second_signal_ends_a_run_that_cannot_stop(start: Any, folder: Path) -> None:
    program = start([*WRAPPER, "tiny.toml", "--set", "run.steps=100000"], folder)
    program.wait_for("step 2/")
    ranks = workers(program.process.pid)
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    # A second run of the name leaves the first alone.
    second = start([*WRAPPER, "tiny.toml"], folder)
    assert second.end() == 2
    assert second.output.startswith("error: the run runs/tiny is in progress in another process; ")
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["tiny", "tiny.lock"]
    program.process.send_signal(signal.SIGINT)
    program.wait_for("stopping")
    program.process.send_signal(signal.SIGINT)
    assert program.end() not in (0, None)
    assert sorted(ranks) == [0, 1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


def test_a_rank_that_does_not_answer_ends_the_others_within_the_timeout(start: Any, folder: Path) -> None:
    settings = ["run.steps=100000", "parallel.timeout_s=3", "scaler.policy=static", "scaler.init_scale=1024"]
    settings += ["parallel.layout=ddp", "train.accumulation=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    program = start([*WRAPPER, "tiny.toml", *options], folder)
    program.wait_for("step 12/")
    silent = workers(program.process.pid)[1]
    os.kill(silent, signal.SIGSTOP)
    line = program.wait_for(r"error: rank 0 at step \d+: ")
    assert "peer" in line
    # The silent one is ended, too, before torchrun has waited for it and says so.
    assert program.end() == 1
    assert not Path(f"/proc/{silent}").exists()
    assert "forcefully exiting" not in program.output
    assert program.lines[-1] == line


def test_a_signal_before_the_start_ends_the_wrapper_well(start: Any, folder: Path) -> None:
    # The config is a pipe that nobody writes to, so the check lasts until the signal.
    os.mkfifo(folder / "pipe.toml")
    program = start([*WRAPPER, "pipe.toml"], folder)
    # Opening it for writing returns when the check has opened it for reading.
    with (folder / "pipe.toml").open("w"):
        checker = descendants(program.process.pid)
        program.process.send_signal(signal.SIGTERM)
        assert program.end() == 0
    assert program.output == "stopped before anything was started\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in checker)


def test_an_error_of_the_user_reaches_the_exit_code_of_the_wrapper(start: Any, folder: Path) -> None:
    program = start([*WRAPPER, "tiny.toml", "--set", "train.warmpu=3"], folder)
    assert program.end() == 2
    assert program.output == "error: tiny.toml: there is no key train.warmpu; did you mean train.warmup?\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.toml"], "the config absent.toml does not exist"),
        (["tiny.toml", "--set", "train.warmpu=3"], "there is no key train.warmpu; did you mean train.warmup?"),
        (["tiny.toml", "--set", "train.batch=many"], "train.batch = 'many' cannot be used"),
        (["tiny.toml", "--set", "data.path=absent"], "data.path = 'absent' does not exist"),
        (["tiny.toml", "--set", "data.path=empty.txt"], "the text of empty.txt is empty"),
        (["tiny.toml", "--set", "model.sequence=9000"], "the training part of text.txt has 8550 of 9000 tokens"),
        (["tiny.toml", "--set", "model.sequence=500"], "the validation part of text.txt has 450 of 9000 tokens"),
        (["tiny.toml", "--resume"], "there is no checkpoint in runs/tiny"),
    ],
)
def test_errors_of_the_user_are_one_sentence_and_exit_code_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty.txt").touch()
    assert pretrain.main(arguments) == 2
    assert not dist.is_initialized()
    assert not (folder / "runs").exists()
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    # Under torchrun only the first rank of a machine says it.
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for variable, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(variable, value)
    assert pretrain.main(arguments) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("module", ["pydantic", "rich"])
def test_a_missing_extra_is_one_sentence(folder: Path, module: str) -> None:
    code = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path({PROGRAM!r}, run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-c", code, "tiny.toml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "launch")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.endswith(f"needs {module}, which is not installed: pip install 'distscale[train]'\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model.width=64"], "model.width was 32 and is 64 now"),
        (["scaler.growth_interval=5", "run.steps=90"], "scaler.growth_interval was 20 and is 5 now"),
        (["train.lr=1e-3"], "train.lr was 0.01 and is 0.001 now"),
        (["run.steps=79"], "run.steps = 79, but 80 steps are done; nothing left to train"),
        (["train.log_every=2"], "all 80 steps are done, nothing left to train"),
        (["data.path=other.txt", "run.steps=90"], "the text of other.txt is not the one"),
    ],
)
def test_a_change_that_makes_another_run_is_refused(
    finished: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    folder = finished[0].parents[1]
    monkeypatch.chdir(folder)
    (folder / "other.txt").write_bytes(SENTENCE * 99 + SENTENCE[::-1])
    before = (finished[0] / "config.toml").read_bytes()
    assert pretrain.main(["tiny.toml", "--resume", *(f"--set={argument}" for argument in arguments)]) == 2
    assert sentence in capsys.readouterr().err
    assert (finished[0] / "config.toml").read_bytes() == before


def test_what_does_not_change_the_run_may_change(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path)
    shutil.copytree(finished[0], folder / "runs" / "tiny")
    (folder / "same.txt").write_bytes(SENTENCE * 100)
    monkeypatch.chdir(folder)
    config = load_config("tiny.toml", ["run.steps=90", "train.keep=5", "data.path=same.txt"])
    point = resume_point(config, load_text(config), False)
    assert point.step == NUM_STEPS
    assert point.notes == (
        "note: run.steps was 80 and is 90 from here on, and the learning rate follows the new length",
        "note: data.path was text.txt and is same.txt from here on",
        "note: train.keep was 2 and is 5 from here on",
    )
    # Of two checkpoints, the newest is damaged, then both are.
    newest, older = point.path, point.path.with_name("step_75")
    part = newest / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:100])
    assert "__1_0.distcp has 100 of" in str(damage(newest))
    assert damage(older) is None
    fallback = resume_point(config, load_text(config), False)
    assert (fallback.path, fallback.step) == (older, 75)
    assert fallback.notes[0].startswith(f"the checkpoint {newest} is damaged (__1_0.distcp has 100 of ")
    (older / "__0_0.distcp").unlink()
    assert pretrain.main(["tiny.toml", "--resume"]) == 2
    printed = capsys.readouterr().err
    assert "__0_0.distcp is missing" in printed
    assert "no other is left; leave --resume out to start afresh" in printed


def test_an_older_checkpoint_and_a_record_with_a_hole_are_told(
    start: Any, finished: tuple[Path, str], tmp_path: Path
) -> None:
    folder = prepare(tmp_path)
    run = folder / "runs" / "tiny"
    shutil.copytree(finished[0], run)
    (run / "checkpoints" / "step_80" / "__1_0.distcp").unlink()
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text("".join(lines[:10] + lines[12:]))
    program = start([*WRAPPER, "tiny.toml", "--resume"], folder)
    assert program.end() == 1, program.output
    assert "step_80 is damaged (__1_0.distcp is missing); an older one is used" in program.output
    assert "lacks 2 of the steps so far, the first is 10" in program.output
    assert "resumed runs/tiny at step 75" in program.output
    assert [row["step"] for row in record(run)] == [*range(10), *range(12, NUM_STEPS)]
    # Below whatever torchrun reports.
    assert program.lines[-1] == "FAIL: the record steps.jsonl lacks 2 steps, the first is 10\n"


def test_the_settings_that_a_run_keeps_are_named_if_they_are_gone(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path)
    shutil.copytree(finished[0], folder / "runs" / "tiny")
    monkeypatch.chdir(folder)
    settings = folder / "runs" / "tiny" / "config.toml"
    settings.write_bytes(b"")
    assert pretrain.main(["tiny.toml", "--resume"]) == 2
    assert "the run itself keeps in runs/tiny/config.toml cannot be used" in capsys.readouterr().err
    settings.unlink()
    assert pretrain.main(["tiny.toml", "--resume"]) == 2
    assert "the run itself keeps in runs/tiny/config.toml cannot be used" in capsys.readouterr().err


def test_a_run_in_progress_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    lock = RunLock(Path("runs/tiny"))
    for more in ([], ["--check"]):
        assert pretrain.main(["tiny.toml", *more]) == 2
        assert "the run runs/tiny is in progress in another process" in capsys.readouterr().err
    lock.release()
    # The check of another node may come at the same time.
    other = RunLock(Path("runs/tiny"), is_shared=True)
    assert pretrain.main(["tiny.toml", "--check"]) == 0
    assert pretrain.main(["tiny.toml"]) == 2
    other.release()
    # The check has not kept it.
    RunLock(Path("runs/tiny")).release()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*file/run\.lock: .*; choose another folder in run\.out"):
        RunLock(tmp_path / "file" / "run")


def test_an_earlier_run_is_moved_aside_and_never_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert move_aside(run) is None
    for number in (1, 2):
        run.mkdir()
        (run / "steps.jsonl").write_text(str(number))
        assert move_aside(run) == tmp_path / f"run.{number}"
    assert [(tmp_path / f"run.{number}" / "steps.jsonl").read_text() for number in (1, 2)] == ["1", "2"]
    run.mkdir()
    assert move_aside(run) is None


def test_checkpoints_are_seen_by_name_and_whole_with_their_manifest(tmp_path: Path) -> None:
    for name in ("step_9", "step_10", "step_11", "partial_12", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    found = checkpoints_of(tmp_path)
    assert list(found) == [9, 10, 11]
    (found[9] / "manifest.json").write_text('{"part": [3, 891568578]}')
    (found[9] / "part").write_text("abc")
    (found[10] / "manifest.json").write_text("{")
    expected = [None, "manifest.json is no list of files", "manifest.json is missing"]
    assert [damage(path) for path in found.values()] == expected
