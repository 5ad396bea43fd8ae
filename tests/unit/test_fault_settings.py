"""Faults on purpose: how they are written, which are refused, and what they do to one rank."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from distscale import ConfigError, DistributedGradScaler
from distscale.config import load_config
from distscale.faults import KINDS, Fault, InjectedError, check_faults, parse_faults, planned_faults
from distscale.injector import Injector


def test_faults_are_read_as_they_are_written() -> None:
    text = "inf step=5 rank=1 tensor=blocks.0.up;\n slow seconds=1.5 rank=0 step=2;;kill step=12 rank=2 restart=1\n"
    faults = parse_faults(text)
    assert faults == (
        Fault("inf", 5, 1, tensor="blocks.0.up"),
        Fault("slow", 2, 0, seconds=1.5),
        Fault("kill", 12, 2, restart=1),
    )
    assert parse_faults("; ".join(map(str, faults))) == faults
    assert parse_faults(" ;\n") == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "kil step=1 rank=0",
            "the fault 'kil step=1 rank=0' is of no known kind; there are inf, -inf, nan, raise, hang",
        ),
        ("kill step=1", "lacks rank=; add it"),
        ("nan step=1 rank=0", "lacks tensor=; add it"),
        ("slow", "lacks rank= and seconds= and step=; add it"),
        ("kill step=1 rank=0 tensor=a", "has 'tensor=a', but kill takes rank=, step= and perhaps restart=, once"),
        ("kill step=1 rank=0 step=2", "has 'step=2', but kill takes"),
        ("kill step=1 rank", "has 'rank', but kill takes"),
        ("kill step=-1 rank=0", "has step=-1, which is not a whole number from 0 on"),
        ("kill step=1 rank=0 restart=x", "has restart=x, which is not a whole number from 0 on"),
        *(
            (f"slow step=1 rank=0 seconds={seconds}", f"has seconds={seconds}, which is not a number above 0")
            for seconds in ("0", "nan", "inf", "-1", "1s")
        ),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned_faults((), {"DISTSCALE_FAULTS": text})
    assert str(caught.value).startswith("DISTSCALE_FAULTS: the fault ")
    assert sentence in str(caught.value)
    config = tmp_path / "run.toml"
    config.write_text(f'run.name = "x"\nfaults.inject = ["{text}"]\n')
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert str(caught.value).startswith(f"{config}: faults.inject: the fault ")
    assert sentence in str(caught.value)


def test_faults_of_a_config_and_of_the_environment_add_up(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('run.name = "x"\nfaults.inject = ["hang step=1 rank=0", "kill step=2 rank=0"]\n')
    inject = load_config(config).faults.inject
    planned = planned_faults(inject, {"DISTSCALE_FAULTS": "raise step=3 rank=0"})
    assert [fault.kind for fault in planned] == ["hang", "kill", "raise"]
    assert planned_faults((), {}) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kill step=1 rank=4", "never comes about: there are 4 ranks, from 0 on"),
        ("kill step=30 rank=3", "never comes about: the run has 30 steps, from 0 on"),
        ("full_disk step=25 rank=0", "never comes about: there is no checkpoint after 25 steps"),
        ("cut_checkpoint step=0 rank=0", "never comes about: there is no checkpoint after 0 steps"),
        ("kill_in_checkpoint step=40 rank=0", "never comes about: there is no checkpoint after 40 steps"),
    ],
)
def test_a_fault_that_never_comes_about_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('run.name = "x"\nrun.steps = 30\ntrain.checkpoint_every = 10\n')
    config = load_config(tmp_path / "run.toml", ["train.warmup=2"])
    fine = parse_faults("kill step=29 rank=3; full_disk step=30 rank=3; full_disk step=10 rank=3")
    check_faults(fine, 30, config.saves_at, 4)
    check_faults(parse_faults("kill step=1 rank=99"), 30, config.saves_at, None)
    with pytest.raises(ConfigError, match=f"^the fault '{text}' {sentence}$"):
        check_faults(parse_faults(text), 30, config.saves_at, 4)


def test_a_tensor_that_is_not_there_is_refused_on_all_ranks() -> None:
    faults = parse_faults("inf step=1 rank=3 tensor=absent")
    with pytest.raises(ConfigError, match=r"the model has no such tensor; there are weight, bias$"):
        Injector(faults, 0, 0).check_tensors(["weight", "bias"])
    Injector(faults, 0, 1).check_tensors(["weight", "bias"])


def test_a_fault_strikes_its_rank_at_its_step_in_its_life_alone() -> None:
    model = nn.Linear(2, 2)
    params = dict(model.named_parameters())
    scaler = DistributedGradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    faults = parse_faults(
        "-inf step=1 rank=0 tensor=weight; nan step=1 rank=0 tensor=bias; raise step=2 rank=0; scale step=3 rank=0;"
        "slow step=1 rank=0 seconds=1e-9"
    )
    for rank, restart, step in ((1, 0, 1), (0, 1, 1), (0, 0, 0)):
        Injector(faults, rank, restart).before_exchange(step, params, scaler)
    assert all(param.grad is not None and param.grad.isfinite().all() for param in params.values())
    assert scaler.get_scale() == 8.0
    injector = Injector(faults, 0, 0)
    injector.before_exchange(1, params, scaler)
    assert model.weight.grad is not None and model.bias.grad is not None
    assert model.weight.grad.tolist()[0][0] == -math.inf
    assert model.bias.grad[0].isnan()
    assert model.weight.grad.isfinite().sum() + model.bias.grad.isfinite().sum() == 4
    with pytest.raises(InjectedError, match="raised on purpose by the fault 'raise step=2 rank=0'"):
        injector.before_exchange(2, params, scaler)
    injector.before_exchange(3, params, scaler)
    assert scaler.get_scale() == 16.0
    model.zero_grad()
    with pytest.raises(ConfigError, match="cannot come about: this rank holds no gradient of the tensor"):
        injector.before_exchange(1, params, scaler)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_full_disk_and_a_cut_file_look_like_real_ones(tmp_path: Path) -> None:
    state = {"weight": torch.arange(1000.0)}
    injector = Injector(parse_faults("full_disk step=10 rank=0; cut_checkpoint step=20 rank=0"), 0, 0)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=injector.writer(tmp_path / "full", 10))
    failure, _ = caught.value.failures[0]
    assert isinstance(failure, OSError) and failure.errno == errno.ENOSPC
    for step in (20, 30):
        folder = tmp_path / str(step)
        dcp.save(state, storage_writer=injector.writer(folder, step))
        before = (folder / "__0_0.distcp").stat().st_size
        injector.after_checkpoint(folder, step)
        assert (folder / "__0_0.distcp").stat().st_size == (before // 2 if step == 20 else before)


def test_every_kind_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert all(f"`{kind}`" in text for kind in KINDS)
