"""launch/pretrain.py with FP8 linears and FP8 gradients on two ranks: it learns, and resumes as if never stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sessions import run_in_session, tiny_config
from test_pretrain import LASTING, SENTENCE, record

from distscale import ConfigError
from distscale.config import load_config

ROOT = Path(__file__).parents[2]
NUM_STEPS = 40
CONFIG = tiny_config(
    NUM_STEPS,
    """
accumulation = 2
checkpoint_every = 20
profile_every = 0
[parallel]
timeout_s = 60.0
[precision]
dtype = "fp16"
[scaler]
init_scale = 16777216.0
growth_interval = 10
max_norm = 1.0
[fp8]
linears = true
gradients = true
""",
    layers=2,
    width=64,
)


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    return run_in_session(
        [*command, str(ROOT / "launch/pretrain.py"), "tiny.toml", *arguments],
        folder,
        {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        deadline_s=120.0,
        stderr=subprocess.STDOUT,
    )


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in LASTING} for row in record(run)]


def test_it_learns_and_resumes_bitwise_and_is_compared(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(SENTENCE * 400)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    whole = launch(tmp_path)
    assert whole.returncode == 0, whole.stdout
    run = tmp_path / "runs/tiny"
    undisturbed, summary = rows_of(run), json.loads((run / "summary.json").read_text())
    assert summary["passed"] and summary["num_skips"] > 0
    assert summary["train_loss"] < 0.6 * summary["unigram_entropy"]

    shutil.rmtree(run / f"checkpoints/step_{NUM_STEPS}")
    resumed = launch(tmp_path, "--resume", "--compare")
    assert resumed.returncode == 0, resumed.stdout
    assert f"at step {NUM_STEPS // 2}" in resumed.stdout
    assert rows_of(run) == undisturbed
    again = json.loads((run / "summary.json").read_text())
    assert again["validation_loss"] == summary["validation_loss"]

    losses = {name: result["validation_loss"] for name, result in again["comparison"].items()}
    assert list(losses) == ["FP32", "FP8 without scales"]
    assert all(loss != summary["validation_loss"] for loss in losses.values())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("scaler.enabled=false", "fp8 needs scaler.enabled = true"),
        ("fp8.amax_history_len=0", "fp8.amax_history_len"),
        ("fp8.fp8_format=E5M2", "fp8.fp8_format"),
    ],
)
def test_a_mistake_is_named(setting: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    settings = [setting, "scaler.max_norm="] if "enabled" in setting else [setting]
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "tiny.toml", settings)


def test_the_config_that_comes_along() -> None:
    config = load_config(ROOT / "configs/fsdp2_fp8.toml")
    assert config.fp8.linears and config.fp8.gradients
