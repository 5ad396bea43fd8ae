"""What a DeepSpeed configuration means, against DeepSpeed's own scaler and its own model of the configuration."""

from __future__ import annotations

import copy
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_engines import import_deepspeed

from distscale import ConfigError, DynamicScale, NoScaling, StaticScale
from distscale.checkpoint import SavedState
from distscale.integrations.deepspeed.scale import saved_by_deepspeed
from distscale.integrations.deepspeed.settings import read_config, settings_of, split_block
from distscale.policy import MIN_SCALE, Outcome, Policy, ScaleState

import_deepspeed()


def scaler_of(block: dict[str, Any]) -> Any:
    """DeepSpeed's, from its own reading of the block."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import get_float16_config

    read = get_float16_config({"fp16": {"enabled": True, **block}})
    scaler = CreateLossScaler(torch.half, read.loss_scale, read.loss_scale == 0, read.dynamic_loss_scale_args())
    if scaler.dynamic:
        scaler.raise_error_at_min_scale = False
    return scaler


def start_of(policy: Policy) -> ScaleState:
    counts = (torch.tensor(count, dtype=torch.int32) for count in (0, policy.hysteresis, 0))
    return ScaleState(torch.tensor(policy.init_scale), *counts)


def next_of(policy: Policy, state: ScaleState, is_bad: bool) -> ScaleState:
    yes, no = torch.tensor(True), torch.tensor(False)
    return policy.next_state(state, Outcome(yes if is_bad else no, no, no if is_bad else yes))


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it logs on rank 0


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("block", "share"),
    [
        ({}, 0.002),
        ({"loss_scale_window": 20}, 0.04),
        ({"loss_scale_window": 7, "hysteresis": 1, "initial_scale_power": 24, "min_loss_scale": 16}, 0.11),
        ({"loss_scale_window": 30, "hysteresis": 4, "initial_scale_power": 10}, 0.2),
        ({"loss_scale": 128}, 0.3),
    ],
)
def test_the_trajectory_is_deepspeeds(block: dict[str, Any], share: float) -> None:
    rng = random.Random(0)
    theirs = scaler_of(block)
    policy = settings_of(block, True, {}).policy
    state = start_of(policy)
    scales = set()
    for _ in range(10_000):
        is_bad = rng.random() < share
        theirs.update_scale(is_bad)
        state = next_of(policy, state, is_bad)
        assert state.scale.item() == theirs.cur_scale
        scales.add(state.scale.item())
        if not 2.0**-100 < theirs.cur_scale < 2.0**100:
            break
    assert len(scales) > 3 or "loss_scale" in block


@pytest.mark.usefixtures("_one_rank")
def test_our_state_goes_on_from_deepspeeds_at_any_moment() -> None:
    rng = random.Random(1)
    block = {"loss_scale_window": 5, "hysteresis": 2, "initial_scale_power": 20}
    theirs, policy = scaler_of(block), settings_of(block, True, {}).policy
    assert isinstance(policy, DynamicScale)
    for _ in range(300):
        saved = saved_by_deepspeed(theirs, policy, 0)
        assert isinstance(saved, SavedState)
        ours = ScaleState(
            torch.tensor(saved.scale),
            *(torch.tensor(count, dtype=torch.int32) for count in (saved.growth_tracker, saved.hysteresis_tracker, 0)),
        )
        twin = copy.copy(theirs)
        for is_bad in rng.choices([False, True], weights=[6, 1], k=15):
            twin.update_scale(is_bad)
            ours = next_of(policy, ours, is_bad)
            assert ours.scale.item() == twin.cur_scale
        theirs.update_scale(rng.random() < 0.1)


@pytest.mark.usefixtures("_one_rank")
def test_what_every_other_step_overflows_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    block = {"consecutive_hysteresis": True, "hysteresis": 2}
    theirs = scaler_of(block)
    with caplog.at_level(logging.WARNING, "distscale"):
        policy = settings_of(block, True, {}).policy
    assert "the tolerance is refilled by 10 clean steps in a row, where DeepSpeed asks for one" in caplog.text
    state = start_of(policy)
    for step in range(100):
        theirs.update_scale(step % 2 == 0)
        state = next_of(policy, state, step % 2 == 0)
    assert theirs.cur_scale == 2.0**16  # half of all steps lost, for ever
    assert state.scale.item() == 1.0


def test_the_scale_is_capped_where_deepspeeds_reaches_inf() -> None:
    block = {"loss_scale_window": 1, "initial_scale_power": 100}
    theirs, policy = scaler_of(block), settings_of(block, True, {}).policy
    state = start_of(policy)
    for _ in range(1200):
        theirs.update_scale(False)
        state = next_of(policy, state, False)
    assert theirs.cur_scale == float("inf")
    assert state.scale.item() == 2.0**126


@pytest.mark.parametrize(
    ("block", "overrides", "policy"),
    [
        (
            {"min_loss_scale": 0.25},
            {},
            DynamicScale(growth_interval=1000, hysteresis=2, min_scale=0.25, growth_delay=1),
        ),
        ({"min_loss_scale": 0}, {"hysteresis": 1}, DynamicScale(growth_interval=1000, growth_delay=1)),
        ({"loss_scale": 64}, {}, StaticScale(64.0)),
        ({"loss_scale": 64}, {"policy": "dynamic", "init_scale": 8.0}, DynamicScale(8.0)),
        ({"initial_scale_power": 4}, {"policy": "static"}, StaticScale(16.0)),
        ({}, {"policy": StaticScale(2.0)}, StaticScale(2.0)),
    ],
)
def test_what_a_block_means(block: dict[str, Any], overrides: dict[str, Any], policy: Policy) -> None:
    assert settings_of(block, True, overrides).policy == policy


def test_without_fp16_there_is_no_scale() -> None:
    assert settings_of({"initial_scale_power": 99}, False, {}).policy == NoScaling()
    assert settings_of({"min_loss_scale": 0}, True, {}).policy.min_scale == MIN_SCALE  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("block", "overrides", "said"),
    [
        ({"hysteresis": -1}, {}, r"hysteresis=-1 is not allowed"),
        ({"initial_scale_power": 2000}, {}, r"fp16.initial_scale_power=2000 is not allowed: .* between -126 and 126"),
        ({"initial_scale_power": 2, "min_loss_scale": 8}, {}, r"min_loss_scale=8 is above the scale of the first step"),
        ({"loss_scale": -1}, {}, r"fp16.loss_scale=-1 is not allowed"),
        ({"loss_scale": True}, {}, r"fp16.loss_scale=True is not allowed"),
        ({"loss_scale_window": 0}, {}, r"growth_interval is fp16.loss_scale_window"),
        ({"min_loss_scale": "1"}, {}, r"fp16.min_loss_scale='1' is not allowed"),
        ({}, {"groth": 2}, r"coordinate\(\) has no 'groth'; it takes init_scale"),
        ({}, {"policy": "adaptive"}, r"policy='adaptive' is unknown"),
        ({}, {"max_scale": 2.0}, r"init_scale=65536 must lie between"),
        ({"loss_scale": 64}, {"policy": StaticScale(2.0), "hysteresis": 3}, r"not both: the object brings its own"),
    ],
)
def test_mistakes_are_told(block: dict[str, Any], overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(block, True, overrides)


def test_our_block_is_taken_out(tmp_path: Path) -> None:
    config = {"fp16": {"enabled": True, "min_loss_scale": 0.5}, "distscale": {"max_scale": 2.0**20}, "x": 1}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for given in (config, path, str(path)):
        rest, block = split_block(read_config(given))
        assert rest == {"fp16": {"enabled": True, "min_loss_scale": 1}, "x": 1}
        assert block == {"max_scale": 2.0**20}
    assert config["fp16"] == {"enabled": True, "min_loss_scale": 0.5}
    with pytest.raises(ConfigError, match=r"the \"distscale\" block of the DeepSpeed config has no 'on_step'"):
        split_block({"distscale": {"on_step": 1}})
    with pytest.raises(ConfigError, match="it must be an object"):
        split_block({"distscale": 3})


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[1]", "holds a list, not an object"), (None, "No such file")]
)
def test_a_config_that_cannot_be_read(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path)
    with pytest.raises(ConfigError, match="is a list; it must be a dict or a path of JSON"):
        read_config([1])
