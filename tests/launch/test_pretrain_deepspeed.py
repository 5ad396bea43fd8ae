"""The pretraining program in DeepSpeed engines, under each launcher: as it is elsewhere, and resumed bit by bit."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sessions import tiny_config
from test_pretrain import LASTING, SENTENCE, WRAPPER, Program, record, start

import pretrain
from checkpoints import checkpoints_of, damage
from cluster import Cluster
from data import load_text
from distscale import StepReport
from distscale.config import load_config
from distscale.env import Environment
from engine_config import engine_config
from ranks import run_ranks

__all__ = ["start"]  # a fixture

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "launch" / "pretrain.py")
BIN = Path(sys.executable).parent
DEEPSPEED = [str(BIN / "deepspeed"), "--num_gpus", "2"]
MPIRUN = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
# Some of these start DeepSpeed twice, which takes a while on a busy machine.
pytestmark = pytest.mark.timeout(240)

STAGES = ("0", "1", "2", "3", "3_offload")
NUM_STEPS = 24
NUM_BATCHED_STEPS = 14
SAVED_STEPS = (1, 11)
CONFIG = tiny_config(
    NUM_STEPS,
    """
accumulation = 2
eval_every = 10
checkpoint_every = 10
log_every = 1
[parallel]
timeout_s = 60.0
""",
)


def shipped(stage: str) -> Path:
    return ROOT / "configs" / f"deepspeed_zero{stage}.json"


def prepare(folder: Path) -> Path:
    (folder / "text.txt").write_bytes(SENTENCE * 100)
    (folder / "tiny.toml").write_text(CONFIG, encoding="utf-8")
    # So short a run is to see the scale grow, too.
    engine = json.loads(shipped("2").read_text())
    engine["fp16"]["loss_scale_window"] = 4
    (folder / "zero2.json").write_text(json.dumps(engine), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run that was left alone."""
    folder = prepare(tmp_path_factory.mktemp("finished"))
    program = Program([*WRAPPER, "tiny.toml", "--deepspeed", "zero2.json"], folder)
    try:
        assert program.end() == 0, program.output
    finally:
        program.close()
    return folder / "runs" / "tiny", program.output


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def test_a_run_learns_explains_its_skips_and_leaves_its_results(finished: tuple[Path, str]) -> None:
    run, output = finished
    rows = record(run)
    summary = json.loads((run / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(NUM_STEPS))
    skips = [row for row in rows if row["skipped"]]
    assert skips[0]["scale"] == 2.0**24
    assert all(row["culprit"]["kind"] in ("inf", "nan") and row["culprit"]["rank"] in (0, 1) for row in skips)
    assert all(row["next_scale"] == row["scale"] / 2 for row in skips)
    assert any(row["next_scale"] == 2 * row["scale"] for row in rows), "the scale never grew again"
    assert all(after["scale"] == before["next_scale"] for before, after in itertools.pairwise(rows))
    assert [row["applied"] for row in rows] == [sum(not r["skipped"] for r in rows[:n]) for n in range(NUM_STEPS)]
    assert all(row["grad_norm"] > 0 for row in rows if not row["skipped"])
    assert summary["validation_loss"] < summary["unigram_entropy"]
    assert 0 < summary["exchange_share"] < summary["scaler_share"] < 1
    assert list(checkpoints_of(run)) == [20, NUM_STEPS]
    assert not (run / "checkpoints" / "latest").exists()
    assert re.search(rf"^PASS: validation loss .* {len(skips)} skips, all explained; ranks agree$", output, re.M)
    assert "--compare" not in output
    assert "OVERFLOW!" not in output

    # What the JSON says is kept, filled, and nothing beside it says otherwise.
    settings = tomllib.loads((run / "config.toml").read_text())
    assert set(settings) == {"run", "model", "data", "train", "parallel"}
    assert settings["parallel"] == {"timeout_s": 60.0}
    engine = json.loads((run / "deepspeed.json").read_text())
    assert engine["train_micro_batch_size_per_gpu"] == 4
    assert engine["gradient_accumulation_steps"] == 2


def test_a_stopped_run_resumes_under_another_launcher_as_if_it_had_not_been_stopped(
    start: Any, folder: Path, finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = record(finished[0])
    run = folder / "runs" / "tiny"
    call = ["tiny.toml", "--deepspeed", "zero2.json"]
    # A stop that rank 1 alone is asked for before the first step, which overflows.
    (folder / "stop-1").touch()
    shell = ["sh", "-c", 'DISTSCALE_STOP_FILE=stop-$OMPI_COMM_WORLD_RANK exec "$@"', "-"]
    # By MPI the ranks agree to meet at this port.
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    program = start([*MPIRUN, *shell, sys.executable, PROGRAM, *call], folder)
    assert program.end() == 0, program.output
    assert f"to continue: mpirun -n 2 python {PROGRAM} {' '.join(call)} --resume" in program.output
    assert list(checkpoints_of(run)) == [1]
    assert not (run / "summary.json").exists()

    # Beside it is what seems a whole checkpoint of a later step, but for one bit in its largest file.
    spoilt = run / "checkpoints" / "step_9"
    shutil.copytree(checkpoints_of(finished[0])[20], spoilt)
    file = max(spoilt.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert damage(spoilt) is None

    program = start([*DEEPSPEED, "--master_port", str(free_port()), PROGRAM, *call, "--resume"], folder)
    assert program.end() == 0, program.output
    told = f"step_9 is damaged ({file.name} has other bytes than were written); an older one is used"
    assert told in program.output
    assert "resumed runs/tiny at step 1" in program.output
    for before, after in zip(undisturbed, record(run), strict=True):
        assert {key: after[key] for key in LASTING} == {key: before[key] for key in LASTING}
    expected, summary = (json.loads((r / "summary.json").read_text()) for r in (finished[0], run))
    for key in expected.keys() - {"step_time_s", "scaler_share", "exchange_share"}:
        assert summary[key] == expected[key], key


class Trajectory(NamedTuple):
    """What a trainer has done; a text is there where NaN must equal NaN."""

    reports: list[StepReport]
    shared: list[str]
    """Of each step: what must be equal on all ranks."""
    losses: list[float]
    """This rank's own."""
    validation_loss: float
    fingerprint: str

    def since(self, step: int) -> tuple[Any, ...]:
        return (self.shared[step:], self.losses[step:], self.validation_loss, self.fingerprint)


def train_and_resume(rank: int, folder: Path, stage: str) -> list[Trajectory]:
    """One run of a shipped config, and those that go on from its first and from its second checkpoint."""
    from deepspeed_trainer import DeepSpeedTrainer

    places = ["run.name=zero" + stage, f"run.out={folder}", f"data.path={folder}/text.txt"]
    config = load_config(folder / "tiny.toml", places)
    engine = engine_config(str(shipped(stage)), config, 2)
    text, cluster = load_text(config), Cluster(Environment(rank, rank, 2, 2), torch.device("cpu"))
    trajectories = []
    for start_at in (0, *SAVED_STEPS):
        trainer = DeepSpeedTrainer(config, engine, text, cluster)
        if start_at:
            trainer.load(config.folder / "checkpoints" / f"step_{start_at}")
        assert trainer.step == start_at
        steps = []
        while trainer.step < NUM_BATCHED_STEPS:
            steps.append(trainer.train_step())
            if not start_at and trainer.step in SAVED_STEPS:
                trainer.save()
        trajectories.append(
            Trajectory(
                [step.report for step in steps],
                [repr((step.report, step.extra["lr"], step.extra["applied"])) for step in steps],
                [step.extra["loss"] for step in steps],
                trainer.evaluate(),
                repr(trainer.fingerprint()),
            )
        )
    return trajectories


def train_every_stage(rank: int, folder: Path) -> dict[str, list[Trajectory]]:
    return {stage: train_and_resume(rank, folder, stage) for stage in STAGES}


def test_every_shipped_config_trains_and_resumes_bitwise(folder: Path) -> None:
    assert [path.name for path in sorted((ROOT / "configs").glob("deepspeed_*.json"))] == [
        shipped(stage).name for stage in STAGES
    ]
    ranks = run_ranks(train_every_stage, 2, folder, timeout_s=110.0, group_timeout_s=60.0)
    for stage in STAGES:
        for whole, early, late in (rank[stage] for rank in ranks):
            skipped = [report.skipped for report in whole.reports]
            assert skipped[0], stage
            assert all(report.culprit is not None for report in whole.reports if report.skipped), stage
            # At the first checkpoint the optimizer has not stepped yet, at the second it has.
            assert all(skipped[: SAVED_STEPS[0]]) and not all(skipped[: SAVED_STEPS[1]]), stage
            assert whole.validation_loss < whole.losses[0], stage
            assert early.since(0) == whole.since(SAVED_STEPS[0]), stage
            assert late.since(0) == whole.since(SAVED_STEPS[1]), stage
        first, second = (rank[stage][0] for rank in ranks)
        assert (first.shared, first.validation_loss) == (second.shared, second.validation_loss), stage
        assert first.fingerprint == second.fingerprint, stage


@pytest.mark.parametrize(
    ("arguments", "changes", "sentence"),
    [
        (["--deepspeed", "absent.json"], {}, "the DeepSpeed config absent.json cannot be read"),
        ([], {"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu = 8, but train.batch = 4"),
        ([], {"gradient_accumulation_steps": 1}, "steps = 1, but train.accumulation = 2 in the TOML"),
        ([], {"train_batch_size": 16}, "train_batch_size = 16, but train.batch = 4 times train.accumulation = 2 times"),
        ([], {"optimizer": {"type": "Adam"}}, '"optimizer" has no effect here, since the program steps AdamW'),
        ([], {"tensor_parallel": {"autotp_size": 2}}, "the program knows data parallelism alone; take it out"),
        ([], {"gradient_clipping": "auto"}, 'gradient_clipping = "auto", but the TOML has nothing to put there'),
        ([], {"distscale": {"init_scal": 4}}, "'init_scal'"),
        ([], {"fp16": {"enabled": True, "hysteresis": -1}}, "hysteresis"),
        (["--set", "scaler.init_scale=4"], {}, "scaler.init_scale has no effect with --deepspeed, where bad.json"),
        (["--set", "parallel.layout=ddp"], {}, "parallel.layout has no effect with --deepspeed"),
        (["--set", "precision.dtype=bf16"], {}, "precision.dtype has no effect with --deepspeed"),
        (["--set", "train.profile_every=5"], {}, "train.profile_every has no effect with --deepspeed, where gradients"),
        (
            ["--set", "train.checkpoint_async=true"],
            {},
            "train.checkpoint_async has no effect with --deepspeed, where Deep",
        ),
        (["--set", "faults.inject=['kill step=1 rank=0']"], {}, "faults.inject has no effect with --deepspeed"),
        (["--set", "fp8.linears=true"], {}, "fp8.linears has no effect with --deepspeed, where nothing is in FP8"),
        (["--compare"], {}, "--compare changes the precision, which with --deepspeed the JSON says"),
        (["--resume"], {}, "there is no checkpoint in runs/tiny"),
    ],
)
def test_contradictions_and_mistakes_are_one_sentence_and_exit_code_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    changes: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.chdir(folder)
    for variable, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(variable, value)
    engine = json.loads(shipped("2").read_text()) | changes
    (folder / "bad.json").write_text(json.dumps(engine), encoding="utf-8")
    assert pretrain.main(["tiny.toml", "--deepspeed", "bad.json", *arguments]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "change", "sentence"),
    [
        (
            ["--deepspeed", "zero2.json"],
            ("gradient_clipping", 2.0),
            "gradient_clipping of the DeepSpeed config was 1",
        ),
        (
            ["--deepspeed", "zero2.json"],
            ("zero_optimization", {"stage": 1}),
            "zero_optimization.stage of the DeepSpeed",
        ),
        (["--deepspeed", "zero2.json"], ("fp16", {"enabled": False}), "fp16.enabled of the DeepSpeed config was True"),
        ([], None, "the run was started with --deepspeed; give that again"),
        (["--deepspeed", "zero2.json"], ("steps_per_print", 5), "all 24 steps are done, nothing left to train"),
    ],
)
def test_a_change_that_makes_another_run_is_refused(
    finished: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    change: tuple[str, Any] | None,
    sentence: str,
) -> None:
    folder = prepare(tmp_path)
    shutil.copytree(finished[0], folder / "runs" / "tiny")
    monkeypatch.chdir(folder)
    if change is not None:
        engine = json.loads((folder / "zero2.json").read_text()) | dict([change])
        (folder / "zero2.json").write_text(json.dumps(engine), encoding="utf-8")
    assert pretrain.main(["tiny.toml", "--resume", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_of_another_kind_is_not_resumed_in_deepspeed(
    finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path)
    shutil.copytree(finished[0], folder / "runs" / "tiny")
    (folder / "runs" / "tiny" / "deepspeed.json").unlink()
    monkeypatch.chdir(folder)
    assert pretrain.main(["tiny.toml", "--resume", "--deepspeed", "zero2.json"]) == 2
    assert "so the run was not one with --deepspeed; leave --deepspeed out" in capsys.readouterr().err


def test_deepspeed_that_is_not_installed_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert pretrain.main(["tiny.toml", "--deepspeed", "zero2.json"]) == 2
    assert capsys.readouterr().err == (
        "error: --deepspeed needs deepspeed, which is not installed: pip install 'distscale[train,deepspeed]'\n"
    )


def test_what_deepspeed_refuses_and_what_it_cannot_load_are_sentences(
    start: Any, finished: tuple[Path, str], folder: Path
) -> None:
    engine = json.loads((folder / "zero2.json").read_text())
    engine["zero_optimization"]["stagee"] = 2
    (folder / "typo.json").write_text(json.dumps(engine), encoding="utf-8")
    (folder / "other").mkdir()
    shutil.copytree(finished[0], folder / "other" / "tiny")
    # Both alone, without a launcher.
    refused = start([sys.executable, PROGRAM, "tiny.toml", "--deepspeed", "typo.json"], folder)
    resumed = ["--resume", "--set", "run.out=other", "--set", "run.steps=30"]
    unloaded = start([sys.executable, PROGRAM, "tiny.toml", "--deepspeed", "zero2.json", *resumed], folder)
    assert refused.end() == unloaded.end() == 1
    assert refused.lines[-1] == (
        "error: rank 0 at step 0: DeepSpeed refuses its config: stagee: Extra inputs are not permitted\n"
    )
    assert "DeepSpeed cannot load the checkpoint other/tiny/checkpoints/step_24: " in unloaded.lines[-1]
    assert "world size of 2" in unloaded.lines[-1]
