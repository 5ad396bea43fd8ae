"""The verdict follows from the numbers, and the learning rate from the applied steps."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from data import Text
from display import power_of_two
from distscale.config import Config
from distscale.sections import TrainSection
from summary import show, summarize, to_json
from trainer import learning_rate


def config(steps: int) -> Config:
    return Config.model_validate({"run": {"name": "test", "steps": steps}, "train": {"warmup": 0}})


TEXT = Text("somewhere", np.zeros(9, np.uint8), np.zeros(9, np.uint8), vocabulary=256, entropy=3.0, checksum=0)


def row(step: int, **changes: Any) -> dict[str, Any]:
    applied = {"step": step, "skipped": False, "scale": 4.0, "next_scale": 4.0, "culprit": None, "vetoed_by": None}
    return applied | {"loss": 2.0, "time_s": 0.5, "scaler_s": 0.02, "exchange_s": 0.01} | changes


def skipped(step: int, **changes: Any) -> dict[str, Any]:
    culprit = {"rank": 1, "tensor": "head.weight", "kind": "inf"}
    return row(step, **({"skipped": True, "scale": 8.0, "culprit": culprit} | changes))


def test_a_run_passes_if_it_learned_explains_its_skips_and_its_ranks_agree() -> None:
    summary = summarize(config(3), TEXT, [skipped(0), row(1), row(2, loss=1.0)], 1.5, True, None)
    assert summary["passed"]
    assert summary["verdict"] == (
        "PASS: validation loss 1.500 < unigram entropy 3.000 nats; 1 skip, explained; ranks agree"
    )
    assert (summary["steps"], summary["applied_steps"], summary["num_skips"]) == (3, 2, 1)
    assert summary["train_loss"] == pytest.approx(5 / 3)
    assert summary["scaler_share"] == pytest.approx(0.04)
    assert summary["exchange_share"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("rows", "loss", "ranks_agree", "sentence"),
    [
        ([row(0)], 3.0, True, "FAIL: validation loss 3.000 is not below unigram entropy 3.000 nats"),
        ([row(0)], math.nan, True, "FAIL: validation loss nan is not below unigram entropy 3.000 nats"),
        ([skipped(0, culprit=None), row(1)], 1.0, True, "FAIL: steps 0 were skipped for no reason that is known"),
        ([row(0)], 1.0, False, "FAIL: RANKS DIFFER"),
    ],
)
def test_a_run_fails_for_each_reason_alone(
    rows: list[dict[str, Any]], loss: float, ranks_agree: bool, sentence: str
) -> None:
    summary = summarize(config(len(rows)), TEXT, rows, loss, ranks_agree, None)
    assert not summary["passed"]
    assert summary["verdict"] == sentence


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row(0), row(3)], "FAIL: the record steps.jsonl lacks 2 steps, the first is 1"),
        ([], "FAIL: the record steps.jsonl lacks 4 steps, the first is 0"),
    ],
)
def test_steps_without_a_line_are_not_vouched_for(rows: list[dict[str, Any]], sentence: str) -> None:
    summary = summarize(config(4), TEXT, rows, 1.0, True, None)
    assert not summary["passed"]
    assert summary["verdict"] == sentence
    show(Console(file=io.StringIO()), summary)
    assert json.loads(to_json(summary), parse_constant=pytest.fail)["steps"] == len(rows)


def test_a_vetoed_step_is_explained_and_shown() -> None:
    comparison = {"FP32": {"validation_loss": 1.25, "train_loss": 1.0, "num_skips": 0}, "other": {"error": "ended"}}
    rows = [skipped(0, culprit=None, vetoed_by=3), row(1, loss="nan")]
    summary = summarize(config(len(rows)), TEXT, rows, 1.5, True, comparison)
    assert summary["passed"]
    saved = json.loads(to_json(summary), parse_constant=pytest.fail)
    assert saved["train_loss"] == "nan"
    assert saved["comparison"] == comparison
    out = io.StringIO()
    show(Console(file=out, width=120), summary)
    for words in ("vetoed by rank 3 at scale 2^3", "1.250 nats validation", "ended", "nan nats", "PASS"):
        assert words in out.getvalue()


def test_shares_of_the_gradients_are_the_least_and_the_greatest() -> None:
    def profile(lost: int) -> dict[str, dict[str, int]]:
        return {name: {"nonzero": 10, "lost": lost, "subnormal": 5} for name in ("fp16", "e5m2", "e4m3")}

    rows = [row(0, gradients=profile(1)), row(1), row(2, gradients=profile(3))]
    gradients = summarize(config(len(rows)), TEXT, rows, 1.5, True, None)["gradients"]
    assert gradients["steps"] == [0, 2]
    assert gradients["fp16"] == {"lost": [0.1, 0.3], "subnormal": [0.5, 0.5]}


def test_the_learning_rate_warms_up_to_its_peak_and_falls_to_a_tenth() -> None:
    train = TrainSection(lr=1.0, warmup=4)
    rates = [learning_rate(applied, train, 10) for applied in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[10:] == [pytest.approx(0.1), pytest.approx(0.1)]
    assert learning_rate(0, TrainSection(lr=1.0, warmup=0), 1) == 1.0


def test_scales_are_shown_as_powers_of_two() -> None:
    assert [power_of_two(scale) for scale in (1.0, 2.0**17, 2.0**-126, 3.0)] == ["2^0", "2^17", "2^-126", "3"]
