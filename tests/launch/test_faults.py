"""Every fault, on four ranks: a named error on all ranks that are left, then a clean recovery.

Two runs tell it all. One is struck by what a run survives, and is otherwise left alone. The other is struck by that and
by one deadly fault in each of six lives, and is to end equal to the first, bit for bit. The ranks are forked, to import
torch once; test_torchrun_nodes.py has the real torchrun start ranks again that were killed, and that hang.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import output_of
from sessions import run_in_session, tiny_config
from test_pretrain import LASTING
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from cluster import Cluster
from data import load_text
from distscale.config import load_config
from distscale.env import Environment
from trainer import Trainer

FORKED_RANKS = Path(__file__).with_name("forked_ranks.py")
RANKS = range(4)
NUM_STEPS = 30
SLOW_S = 0.5
DEADLINE_S = 300.0
CONFIG = tiny_config(
    NUM_STEPS,
    f"""
eval_every = 0
checkpoint_every = 5
profile_every = 0
[parallel]
timeout_s = 12.0
[scaler]
growth_interval = 8
max_norm = 1.0
[faults]
inject = [
  "inf step=4 rank=1 tensor=head.weight",
  "nan step=5 rank=2 tensor=token",
  "-inf step=6 rank=3 tensor=blocks.0.mlp_in.weight",
  "slow step=7 rank=0 seconds={SLOW_S}",
]
""",
    name="struck",
)
LOST_PEER = r"the exchange of a step failed\. A peer died"
# One life after another: the fault, the step of the errors, and by rank what they say. A checkpoint is certainly
# complete by then, that of step 5, and a later one may be on its way to the disk. In the life of the cut checkpoint
# nobody notices; the next one does.
LIVES = [
    ("kill step=12 rank=2", 12, dict.fromkeys((0, 1, 3), LOST_PEER)),
    (
        "raise step=13 rank=1",
        13,
        {**dict.fromkeys((0, 2, 3), LOST_PEER), 1: "raised on purpose by the fault 'raise step=13 rank=1 restart=1'"},
    ),
    (
        "scale step=14 rank=3",
        14,
        dict.fromkeys(RANKS, r"ranks differ in scale at step 14: from \d+ to \d+, rank 3 unlike ranks 0 \.\.\. 2\."),
    ),
    # It is written while training goes on, so the ranks hear of it when the next one is due.
    (
        "full_disk step=20 rank=1",
        24,
        dict.fromkeys(
            RANKS,
            r"the checkpoint runs/struck/checkpoints/partial_20 could not be written, with \S+ MB free there: "
            r"rank 1: \[Errno 28\] No space left on device$",
        ),
    ),
    # Its peers learn of it wherever they are by then.
    ("kill_in_checkpoint step=20 rank=2", None, dict.fromkeys((0, 1, 3), "(?i)a peer died")),
    ("hang step=22 rank=0; cut_checkpoint step=20 rank=3", 22, dict.fromkeys((1, 2, 3), LOST_PEER)),
]


def prepare(folder: Path) -> None:
    (folder / "text.txt").write_bytes(b"Pack my box with five dozen liquor jugs; the lazy dog sleeps on.\n" * 140)
    (folder / "struck.toml").write_text(CONFIG, encoding="utf-8")


def live(folder: Path, lives: Sequence[Collection[int]], *arguments: str, **environment: str) -> None:
    """Trains until the last life has ended well.

    Args:
        folder: to train in.
        lives: the ranks of each that end by themselves.
        arguments: of the program.
        environment: variables to add.
    """
    prepare(folder)
    told = json.dumps([list(ending) for ending in lives])
    command = [sys.executable, str(FORKED_RANKS), told, str(len(RANKS)), "struck.toml", *arguments]
    ended = run_in_session(command, folder, environment, DEADLINE_S, subprocess.STDOUT)
    assert ended.returncode == 0, ended.stdout + "".join(log.read_text() for log in sorted(folder.glob("life-*.log")))


def record(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/struck/steps.jsonl").read_text().splitlines()]


def state(folder: Path) -> dict[str, Any]:
    """All that the last checkpoint holds, by name."""
    path = folder / "runs" / "struck" / "checkpoints" / f"step_{NUM_STEPS}"
    # As the ranks wrote it: one entry a tensor and a value, whatever their shards were.
    dcp_to_torch_save(path, folder / "state.pt")
    found: dict[str, Any] = {}
    todo = [("", torch.load(folder / "state.pt", weights_only=True))]
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            todo += [(f"{name}.{key}", item) for key, item in items]
        else:
            found[name] = value
    assert len(found) >= len(FileSystemReader(path).read_metadata().state_dict_metadata)
    return found


def check_equal(folder: Path, other: Path) -> None:
    """Compares two runs by their records and by their last checkpoints, bit for bit."""
    for before, after in zip(record(folder), record(other), strict=True):
        assert {key: after[key] for key in LASTING} == {key: before[key] for key in LASTING}
    before, after = state(folder), state(other)
    assert before.keys() == after.keys()
    assert {".rng.0.cpu", ".rng.3.cpu", ".scaler.scale", ".progress.step", ".model.token"} <= after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, name


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that only what it survives was done to."""
    folder = tmp_path_factory.mktemp("survived")
    live(folder, [RANKS])
    return folder


def test_all_ranks_skip_what_is_bad_on_one_and_wait_for_what_is_slow(survived: Path) -> None:
    output = output_of(survived, 0, 0)
    assert "faults to come: inf step=4 rank=1 tensor=head.weight; nan step=5 rank=2 tensor=token; -inf " in output
    rows = record(survived)
    assert {row["step"]: row["culprit"] for row in rows if row["skipped"]} == {
        4: {"rank": 1, "tensor": "head.weight", "kind": "inf"},
        5: {"rank": 2, "tensor": "token", "kind": "nan"},
        6: {"rank": 3, "tensor": "blocks.0.mlp_in.weight", "kind": "inf"},
    }
    assert rows[7]["time_s"] >= SLOW_S
    assert "ranks agree" in output


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_run_that_is_struck_again_and_again_ends_like_one_left_alone(survived: Path, tmp_path: Path) -> None:
    faults = [f"{fault} restart={restart}" for restart, (told, *_) in enumerate(LIVES) for fault in told.split("; ")]
    lives = [expected.keys() for *_, expected in LIVES] + [RANKS]
    live(tmp_path, lives, "--set", "train.checkpoint_async=true", DISTSCALE_FAULTS="; ".join(faults))
    for life, (fault, step, expected) in enumerate(LIVES):
        for rank in RANKS:
            output = output_of(tmp_path, life, rank)
            errors = re.findall(rf"^error: rank {rank} at step (\d+): (.*)$", output, re.M)
            assert len(errors) == (rank in expected), (fault, rank, output)
            for at, text in errors:
                assert re.search(expected[rank], text), (fault, rank, text)
                assert step is None or int(at) == step, (fault, rank, at)
    outputs = [output_of(tmp_path, life, 0) for life in range(len(lives))]
    for output in outputs[1:]:
        assert re.search(r"^resumed runs/struck at step \d+$", output, re.M), output
    assert "step_20 is damaged (__3_0.distcp has " in outputs[-1]
    assert "PASS" in outputs[-1]
    run = tmp_path / "runs" / "struck"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_25", "step_30"]
    assert [path.name for path in run.parent.iterdir() if path.is_dir()] == ["struck"]
    check_equal(survived, tmp_path)


def test_a_restarted_job_does_not_go_on_with_the_run_of_another_job(survived: Path, tmp_path: Path) -> None:
    shutil.copytree(survived / "runs", tmp_path / "runs")
    live(tmp_path, [RANKS], "--set", "run.steps=10", SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1")
    output = output_of(tmp_path, 0, 0)
    assert "the earlier run runs/struck is now runs/struck.1\n" in output
    assert "resumed" not in output


@pytest.mark.parametrize("is_async", [False, True])
def test_a_checkpoint_is_of_the_moment_it_was_asked_for_random_numbers_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"the lazy dog sleeps on. " * 400)
    (tmp_path / "struck.toml").write_text(CONFIG, encoding="utf-8")
    config = load_config("struck.toml", [f"train.checkpoint_async={str(is_async).lower()}"])
    (tmp_path / "runs" / "struck" / "checkpoints" / "partial_3").mkdir(parents=True)  # of a crash
    cluster = Cluster.from_environment(Environment())
    cluster.connect(30.0)
    try:
        trainer = Trainer(config, load_text(config), cluster)
        trainer.train_step()
        before = {name: value.clone() for name, value in get_model_state_dict(trainer.model).items()}
        torch.rand(7)
        trainer.save()
        # Whatever comes next is not to be in it.
        drawn = torch.rand(7)
        with torch.no_grad():
            for param in trainer.model.parameters():
                param.zero_()
        trainer.finish_saving()
        assert [path.name for path in (tmp_path / "runs/struck/checkpoints").iterdir()] == ["step_1"]
        assert not any(param.any() for param in trainer.model.parameters())
        trainer.load(tmp_path / "runs" / "struck" / "checkpoints" / "step_1")
        assert torch.equal(torch.rand(7), drawn)
        after = get_model_state_dict(trainer.model)
        assert all(torch.equal(value.full_tensor(), after[name].full_tensor()) for name, value in before.items())
    finally:
        cluster.disconnect()
