"""The oldest release of DeepSpeed that is supported; the newest is tested elsewhere."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from deepspeed_engines import coordinated, join_ranks, tiny_net
from test_deepspeed_steps import LAYOUTS, WORLD_SIZE, bad_steps, check_bad_steps, growth, wanted_skips

from downloads import download
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

VERSION = "0.18.0"
# Not all: 0.18.0 itself never applies a step of a fused optimizer at stage 0.
NAMES = ("zero0", "zero1", "zero2", "zero2 offload", "bf16 zero0", "bf16 zero1")
# With torch 2.13 on a CPU, its stage 3 now and then computes a NaN from finite values; so it is not trained.
MADE = ("zero3", "zero3 offload", "bf16 zero3", "bf16 optimizer")


def run_all(rank: int, source: Path) -> dict[str, Any]:
    sys.path.insert(0, str(source))
    deepspeed = join_ranks()
    assert deepspeed.__version__.startswith(VERSION)
    assert source in Path(deepspeed.__file__).parents
    seen: dict[str, Any] = {}
    for name in NAMES:
        seen[name] = {"bad": bad_steps(name, rank), "skips": wanted_skips(name, "ours", rank)}
        if LAYOUTS[name].fp16:
            seen[name]["growth"] = growth(name, True)
    for name in MADE:
        engine = coordinated(LAYOUTS[name], tiny_net())
        seen[name] = type(engine.distscale._surface).__name__
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    # pip runs its setup.py, which imports torch.
    archive = download(f"deepspeed=={VERSION}", f"deepspeed-{VERSION}.tar.gz", request.config, "--no-build-isolation")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return run_ranks(run_all, WORLD_SIZE, folder / f"deepspeed-{VERSION}", timeout_s=280.0, take_down=False)


@pytest.mark.parametrize("name", NAMES)
def test_one_decision(name: str, seen: list[dict[str, Any]]) -> None:
    check_bad_steps(name, [results[name]["bad"] for results in seen])
    for results in seen:
        applied = [step_applied for _, step_applied, *_ in results[name]["skips"]]
        assert applied == [True, False, False, True, True]
        assert results[name].get("growth", [(1.0, 3.0)] * 3) == [(1.0, 3.0)] * 3


def test_all_optimizers_are_known(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        assert [results[name] for name in MADE[:3]] == ["ZeRO3"] * 3
        assert results[MADE[3]] in ("BF16", "FP16")  # what a release makes of it
