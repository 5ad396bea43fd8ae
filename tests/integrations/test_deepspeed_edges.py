"""Corners of a DeepSpeed engine, on two gloo ranks: odd gradients, partial loads, other settings, stale buffers."""

from __future__ import annotations

import base64
import json
import logging
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_engines import HALF, Layout, Slope, coordinated, join_ranks, plain_engine, state_of, tiny_net
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from distscale.integrations.deepspeed import deepspeed_initialize
from distscale.integrations.deepspeed.settings import read_config
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

WORLD_SIZE = 2
OFFLOADS = {"zero2 offload": Layout(2, offload=True), "zero3 offload": Layout(3, offload=True)}


SLOPES = torch.arange(1.0, 7.0)


class Sometimes(nn.Module):
    """Two parameters, of which the second takes part when it is told to; its elements have gradients of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(2))
        self.sometimes = nn.Parameter(torch.ones(6))  # in partitions of four elements it begins in the first

    def forward(self, factors: Tensor) -> Tensor:
        loss = (self.always.float() * factors[0].float()).sum()
        return loss + (self.sometimes.float() * SLOPES * factors[1].float()).sum() if factors[1] != 0 else loss


def step(engine: Any, *inputs: Tensor, factor: float = 1.0) -> tuple[bool, bool]:
    """One step of as many micro-batches; whether it was applied, and whether something changed."""
    old = state_of(engine)
    for each in inputs:
        engine.backward(engine(each).float().sum() * factor)
        engine.step()
    return engine.was_step_applied(), not all(map(torch.equal, old, state_of(engine)))


def sparse_gradients() -> list[float]:
    """By how much an embedding moves at stage 0, in FP16 and in BF16; twice, the second time clipped."""
    moves = []
    for fp16 in (True, False):
        for clip in (0.0, 0.2):
            torch.manual_seed(0)
            model = nn.Embedding(8, 4, sparse=True)
            layout = Layout(0, fp16=fp16, clip=clip)
            engine = coordinated(layout, model, optimizer=SGD(model.parameters(), lr=1.0))
            old = model.weight.detach().double()
            engine.backward(engine(torch.tensor([3])).float().sum())  # ones in one row: norm 2
            engine.step()
            moves.append(float((model.weight.detach().double() - old).norm()))
    return moves


def huge_norms() -> dict[str, Any]:
    """Gradients that are finite, of a norm beyond fp32."""
    seen = {}
    for name, layout in {
        "zero0": Layout(0, fp16=False),
        "zero1": Layout(1, fp16=False),
        "zero3": Layout(3, fp16=False),
        "optimizer": Layout(1, fp16=False, extra={"data_types": {"grad_accum_dtype": "fp32"}}),
    }.items():
        engine = coordinated(layout, Slope())
        seen[name] = step(engine, torch.tensor(2.0**127, dtype=torch.bfloat16)), engine.skipped_steps
    return seen


def unused_after_a_nan() -> dict[str, Any]:
    """The parameter that had a NaN takes no part in the next step, or only in its second micro-batch."""
    seen = {}
    for name, layout in {"zero3": Layout(3), "bf16 zero3": Layout(3, fp16=False), **OFFLOADS}.items():
        dtype = HALF[layout.fp16]
        both, first, bad = (torch.tensor(pair, dtype=dtype) for pair in ([1.0, 1.0], [1.0, 0.0], [1.0, math.nan]))
        zero = {**layout.config["zero_optimization"], "ignore_unused_parameters": True}
        layout = replace(layout, extra={"zero_optimization": zero})
        engine = coordinated(layout, Sometimes())
        steps = [step(engine, both), step(engine, bad), step(engine, first), step(engine, both)]
        engine = coordinated(replace(layout, accumulation=2), Sometimes())
        steps += [step(engine, both, both), step(engine, bad, both), step(engine, first, both)]
        seen[name] = steps
    return seen


def parts_of_a_step(is_coordinated: bool) -> dict[str, Any]:
    """By how many slopes a parameter moves that has a part in some micro-batches only, and the norm, squared."""
    from deepspeed.utils import safe_get_full_fp32_param

    both, first = (torch.tensor(pair, dtype=torch.bfloat16) for pair in ([1.0, 1.0], [1.0, 0.0]))
    seen: dict[str, Any] = {}
    for name, layout in {"zero1": Layout(1), "zero3": Layout(3), **OFFLOADS}.items():
        zero = {**layout.config["zero_optimization"], "ignore_unused_parameters": True}
        seen[name] = []
        for steps in ([(both,), (first,)], [(both, both), (first, both), (first, first), (both, first)]):
            layout = replace(layout, fp16=False, accumulation=len(steps[0]), extra={"zero_optimization": zero})
            engine = (coordinated if is_coordinated else plain_engine)(layout, Sometimes())
            param = engine.module.sometimes
            for micro_batches in steps:
                old = safe_get_full_fp32_param(param).clone()
                step(engine, *micro_batches)
                moved = set(((safe_get_full_fp32_param(param) - old) / SLOPES).tolist())  # one number for all
                seen[name].append((*moved, round(float(engine.get_global_grad_norm()) ** 2, 4)))
    return seen


def between_micro_batches(rank: int, load: Path | None, is_nan: bool) -> list[Any]:
    """A NaN loss of one rank in the first of two micro-batches, or a load of another scale after it."""
    engine = coordinated(Layout(2, accumulation=2, fp16_block={"initial_scale_power": 9 if is_nan else 5}), tiny_net())
    seen: list[Any] = []
    for index in range(4):
        loss = engine(torch.ones(3, dtype=torch.half)).float().sum()
        if index == 0 and is_nan and rank == 1:
            loss = loss + torch.tensor(math.nan)  # a constant: the gradients stay finite
        engine.backward(loss)
        engine.step()
        if index == 0 and load is not None:
            engine.load_checkpoint(str(load))
        if index % 2:
            report = engine.distscale.last_step
            culprit = None if report.culprit is None else report.culprit.tensor
            seen.append((report.skipped, culprit, report.vetoed_by, report.scale, report.next_scale))
    return seen


def reports_that_raise(rank: int) -> list[Any]:
    """A callback that raises on one rank leaves the engine as after any other step."""

    def complain(report: Any) -> None:
        if rank == 1:
            raise RuntimeError("from the callback")

    engine = coordinated(Layout(2), tiny_net(), {"on_step": complain})
    said = None
    try:
        step(engine, torch.ones(3, dtype=torch.half))
    except RuntimeError as error:
        said = str(error)
    return [said, engine.global_steps, engine.micro_steps, engine.was_step_applied()]


def partial_loads(rank: int, folder: Path) -> dict[str, Any]:
    """What remains of the scale of a run that loads a checkpoint of another, whole or in part, of another policy."""
    first = coordinated(Layout(2, fp16_block={"initial_scale_power": 9}), tiny_net())
    for _ in range(2):
        step(first, torch.ones(3, dtype=torch.half))
    saved = first.distscale.state_dict()
    first.save_checkpoint(str(folder / "ours"), None, {"mine": 1})
    alone = plain_engine(Layout(2, fp16_block={"initial_scale_power": 9}), tiny_net())
    alone.save_checkpoint(str(folder / "alone"))
    seen: dict[str, Any] = {}
    for what, place, arguments, overrides in [
        ("whole", "ours", {}, {}),
        ("module", "ours", {"load_module_only": True}, {}),
        ("no optimizer", "ours", {"load_optimizer_states": False}, {}),
        ("static", "ours", {}, {"policy": "static"}),
        ("clamped", "alone", {}, {"max_scale": 64.0}),
        ("missing", "nowhere", {}, {}),
    ]:
        engine = coordinated(Layout(2, fp16_block={"initial_scale_power": 5}), tiny_net(), overrides)
        step(engine, torch.ones(3, dtype=torch.half))
        path, client_state = engine.load_checkpoint(str(folder / place), **arguments)
        seen[what] = [engine.distscale.get_scale(), engine.optimizer.cur_scale, engine.distscale.last_step is None]
        if what == "whole":
            assert engine.distscale.state_dict() == saved
            assert client_state["mine"] == 1
        assert (path is None) == (what == "missing")
        assert step(engine, torch.ones(3, dtype=torch.half)) == (True, True)
    return seen


def other_parameters() -> list[Any]:
    """An optimizer may hold a parameter that the module does not."""
    model = tiny_net()
    extra = nn.Parameter(torch.ones(2))
    engine = coordinated(Layout(0), model, optimizer=SGD([*model.parameters(), extra], lr=0.1))
    engine.backward(engine(torch.ones(3, dtype=torch.half)).float().sum() + extra.float().sum())
    engine.step()
    return [engine.was_step_applied(), sorted(engine.distscale.last_step.amax)]


def configs(folder: Path, rank: int) -> list[Any]:
    """Two engines from one namespace, whose config has comments; and one from base64."""
    config = Layout(2).config
    path = folder / f"commented-{rank}.json"
    path.write_text("{ // as DeepSpeed reads it\n" + json.dumps(config)[1:-1] + ",\n}")
    arguments = Namespace(deepspeed_config=str(path))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    scales = []
    for how in ({"args": arguments}, {"args": arguments}, {"config": encoded}):
        model = tiny_net()
        engine, *_ = deepspeed_initialize(
            model=model, optimizer=AdamW(model.parameters()), dist_init_required=False, **how
        )
        scales.append(engine.distscale.get_scale())
    return [scales, arguments.deepspeed_config == str(path)]


def run_all(rank: int, folder: Path) -> dict[str, Any]:
    join_ranks()
    logging.getLogger("distscale").setLevel(logging.ERROR)
    return {
        "sparse": sparse_gradients(),
        "huge": huge_norms(),
        "unused": unused_after_a_nan(),
        "parts": {is_ours: parts_of_a_step(is_ours) for is_ours in (False, True)},
        "raises": reports_that_raise(rank),
        "partial": partial_loads(rank, folder),
        "between": [
            between_micro_batches(rank, load, is_nan)
            for load, is_nan in ((None, True), (folder / "ours", True), (folder / "ours", False))
        ],
        "other": other_parameters(),
        "configs": configs(folder, rank),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_all, WORLD_SIZE, tmp_path_factory.mktemp("edges"), timeout_s=280.0, take_down=False)


def test_sparse_gradients_are_unscaled_and_clipped(seen: list[Any]) -> None:
    """DeepSpeed alone leaves sparse gradients as they are at stage 0: neither divided by a scale nor clipped."""
    for results in seen:
        assert results["sparse"] == pytest.approx([2.0, 0.2, 2.0, 0.2], rel=1e-2)


def test_a_norm_beyond_fp32_is_an_overflow(seen: list[Any]) -> None:
    for results in seen:
        for name in ("zero0", "zero1", "zero3", "optimizer"):
            assert results["huge"][name] == ((False, False), 1)


def test_a_nan_does_not_outlive_its_step(seen: list[Any]) -> None:
    applied, skipped = (True, True), (False, False)
    for results in seen:
        for name, steps in results["unused"].items():
            assert steps == [applied, skipped, applied, applied, applied, skipped, applied], name


def test_a_step_is_made_of_its_own_gradients(seen: list[Any]) -> None:
    """DeepSpeed 0.19.8 leaves gradients in buffers, and steps on them, or adds to them, a step later; see the docs."""
    for results in seen:
        right = [(-1.0, 93.0), (0.0, 2.0), (-1.0, 93.0), (-0.5, 24.75), (0.0, 2.0), (-0.5, 24.75)]
        assert results["parts"][True] == dict.fromkeys(["zero1", "zero3", *OFFLOADS], right)
        alone = results["parts"][False]
        assert alone["zero1"] == right
        assert [moved for moved, _ in alone["zero3"]] == [-1.0, -1.0, -1.0, -1.5, -1.5, -0.5]
        for name in OFFLOADS:
            assert [moved for moved, _ in alone[name]] == [-1.0, -1.0, -1.0, -1.5, -1.5, -1.5]


def test_what_was_known_of_the_first_micro_batch_counts(seen: list[Any]) -> None:
    """After a load, too: DeepSpeed keeps the gradients that it has."""
    for results in seen:
        nan, loaded_after_nan, loaded_after_another_scale = results["between"]
        assert nan == [(True, "loss", None, 512.0, 512.0), (False, None, None, 512.0, 512.0)]
        assert loaded_after_nan == nan
        assert loaded_after_another_scale == [(True, None, 1, 512.0, 512.0), (False, None, None, 512.0, 1024.0)]


def test_a_callback_that_raises_finds_the_step_done(seen: list[Any]) -> None:
    assert [results["raises"] for results in seen] == [[None, 1, 1, True], ["from the callback", 1, 1, True]]


def test_what_is_loaded_of_the_scale(seen: list[Any]) -> None:
    for results in seen:
        assert results["partial"] == {
            "whole": [512.0, 512.0, True],
            "module": [32.0, 32.0, False],
            "no optimizer": [32.0, 32.0, False],
            "static": [32.0, 32.0, False],
            "clamped": [64.0, 64.0, True],
            "missing": [32.0, 32.0, False],
        }


def test_parameters_that_the_module_does_not_have(seen: list[Any]) -> None:
    for results in seen:
        applied, names = results["other"]
        assert applied
        assert names == ["0.bias", "0.weight", "2.bias", "2.weight", "group0.param4"]


def test_configs_are_read_as_deepspeed_reads_them(seen: list[Any], tmp_path: Path) -> None:
    for results in seen:
        assert results["configs"] == [[256.0] * 3, True]
    path = tmp_path / "broken.json"
    path.write_text("[1, 2")
    with pytest.raises(Exception, match="is not JSON"):
        read_config(path)
