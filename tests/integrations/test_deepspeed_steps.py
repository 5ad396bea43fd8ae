"""DeepSpeed, for real, on two gloo ranks: every stage with bad values on every rank, beside DeepSpeed alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_engines import (
    BAD_VALUES,
    HALF,
    Layout,
    Slope,
    coordinated,
    join_ranks,
    plain_engine,
    spoil,
    state_of,
    tiny_net,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from distscale import ConfigError, ScaleExhaustedError
from distscale.bench.counting import Counting
from distscale.integrations.deepspeed import coordinate
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)  # for one spawn that does it all: half a minute on a quiet machine

WORLD_SIZE = 2
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
LAYOUTS = {
    "zero0": Layout(0),
    "zero0 fused": Layout(0, fused=True),
    "zero1": Layout(1),
    "zero2": Layout(2),
    "zero2 offload": Layout(2, offload=True),
    "zero3": Layout(3),
    "zero3 offload": Layout(3, offload=True),
    "bf16 zero0": Layout(0, fp16=False),
    "bf16 zero1": Layout(1, fp16=False),
    "bf16 zero1 unchecked": Layout(1, fp16=False, extra={"bf16": {"enabled": True, "check_grad_overflow": False}}),
    "bf16 optimizer": Layout(1, fp16=False, extra=FP32_GRADS),
    "bf16 zero2 offload": Layout(2, fp16=False, offload=True),
    "bf16 zero3": Layout(3, fp16=False),
}
FP16_LAYOUTS = [name for name, layout in LAYOUTS.items() if layout.fp16]
CHECKS = {
    "ours": {"deepspeed_check": False},
    "DeepSpeed's": {"deepspeed_check": True},
}


def one_step(engine: Any, layout: Layout, rank: int, bad_value: float | None = None) -> bool:
    """Returns whether there was a gradient to put the bad value into."""
    is_spoilt = False
    for index in range(layout.accumulation):
        inputs = torch.linspace(-1.0, 1.0 + rank + index, 3, dtype=HALF[layout.fp16])
        engine.backward(engine(inputs).float().square().sum())
        if index == layout.accumulation - 1 and bad_value is not None:
            is_spoilt = spoil(engine, bad_value)
        engine.step()
    return is_spoilt


def bad_steps(name: str, rank: int) -> dict[str, Any]:
    """A bad value of each kind on each rank in turn; what this rank has seen."""
    layout = LAYOUTS[name]
    model = tiny_net()
    optimizer = None if layout.fused else AdamW(model.parameters(), lr=0.1)
    engine = coordinated(
        layout, model, optimizer=optimizer, scheduler=None if layout.fused else lambda it: StepLR(it, 1, gamma=0.5)
    )
    one_step(engine, layout, rank)
    seen: dict[str, Any] = {"clean": (engine.was_step_applied(), engine.distscale.last_step.skipped), "bad": []}
    for kind, value in BAD_VALUES.items():
        for bad_rank in range(WORLD_SIZE):
            old, counts = state_of(engine), (engine.skipped_steps, engine.global_steps)
            rates = engine.get_lr()
            held = one_step(engine, layout, rank, value if bad_rank == rank else None)
            report = engine.distscale.last_step
            seen["bad"].append(
                {
                    "kind": kind,
                    "bad_rank": bad_rank,
                    "held": held,
                    "applied": engine.was_step_applied(),
                    "skipped": report.skipped,
                    "culprit": report.culprit,
                    "scales": (report.scale, report.next_scale, engine.distscale.get_scale()),
                    "untouched": all(map(torch.equal, old, state_of(engine))),
                    "counted": (engine.skipped_steps - counts[0], engine.global_steps - counts[1]),
                    "same rate": engine.get_lr() == rates,
                }
            )
    old = state_of(engine)
    one_step(engine, layout, rank)
    seen["after"] = (engine.was_step_applied(), all(map(torch.equal, old, state_of(engine))))
    return seen


def losses(name: str, is_coordinated: bool, rank: int) -> list[Any]:
    """Of twelve steps with gradient accumulation and no overflow, away from a growth of the scale."""
    layout = LAYOUTS[name]
    layout = Layout(
        layout.stage,
        layout.fp16,
        layout.offload,
        layout.fused,
        clip=1e9,
        accumulation=2,
        fp16_block={"loss_scale_window": 100, "loss_scale": 0},
        extra=layout.extra,
    )
    model = tiny_net()
    optimizer = None if layout.fused else AdamW(model.parameters(), lr=0.1)
    engine = (coordinated if is_coordinated else plain_engine)(layout, model, optimizer=optimizer)
    seen = []
    for step in range(12):
        inputs = torch.linspace(-1.0, 1.0 + rank + step / 4, 3, dtype=HALF[layout.fp16])
        loss = engine(inputs).float().square().sum()
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return [seen, [tensor.tolist() for tensor in state_of(engine)]]


def growth(name: str, is_coordinated: bool) -> list[Any]:
    """SGD at rate 1 on a gradient of ones, window 2: by how much parameters move, and the norm reported."""
    layout = LAYOUTS[name]
    engine = (coordinated if is_coordinated else plain_engine)(layout, Slope())
    seen = []
    for _ in range(3):
        old = state_of(engine)
        engine.backward(engine(torch.ones((), dtype=HALF[layout.fp16])))
        engine.step()
        moved = [(new - before).float() for new, before in zip(state_of(engine), old, strict=True)]
        largest = max((float(change.abs().max()) for change in moved if change.numel()), default=0.0)
        seen.append((round(largest, 2), round(float(engine.get_global_grad_norm()), 4)))
    return seen


def clipped(name: str, rank: int) -> tuple[float, float, float]:
    """The norm with gradient clipping at 0.5, and by how much the parameters moved in all."""
    from deepspeed.utils import safe_get_full_fp32_param

    layout = LAYOUTS[name]
    layout = Layout(layout.stage, layout.fp16, layout.offload, layout.fused, 0.5, 2, layout.fp16_block, layout.extra)
    engine = coordinated(layout, Slope())

    def masters() -> list[torch.Tensor]:
        if layout.stage == 3:  # whole, since the padding of a partition is never initialized
            return [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
        return [
            param.detach().float().clone()
            for group in engine.optimizer.optimizer.param_groups
            for param in group["params"]
        ]

    old = masters()
    for _ in range(2):
        engine.backward(engine(torch.ones((), dtype=HALF[layout.fp16])))
        engine.step()
    moved = sum((new - before).double().square().sum() for new, before in zip(masters(), old, strict=True))
    assert isinstance(moved, torch.Tensor)
    if layout.stage in (1, 2) or layout.extra:  # partitioned
        dist.all_reduce(moved)
    return float(engine.get_global_grad_norm()), float(engine.distscale.last_step.grad_norm), float(moved.sqrt())


def wanted_skips(name: str, check: str, rank: int) -> list[Any]:
    """A veto of one rank, a NaN loss on one rank, a stop request, a clean step."""
    layout = LAYOUTS[name]
    engine = coordinated(layout, tiny_net(), CHECKS[check])
    seen: list[Any] = []
    for event in ("clean", "veto", "nan loss", "stop", "clean"):
        old = state_of(engine)
        if event == "veto" and rank == 1:
            engine.distscale.veto("a test")
        if event == "stop" and rank == 0:
            engine.distscale.request_stop()
        factor = math.nan if event == "nan loss" and rank == 1 else 1.0
        inputs = torch.linspace(-1.0, 1.0 + rank, 3, dtype=HALF[layout.fp16])
        engine.backward(engine(inputs).float().square().sum() * factor)
        engine.step()
        report = engine.distscale.last_step
        untouched = all(map(torch.equal, old, state_of(engine)))
        culprit = report.culprit and (report.culprit.rank, report.culprit.tensor)
        seen.append((event, engine.was_step_applied(), untouched, report.vetoed_by, culprit, report.stop_requested))
    return seen


def cost(name: str) -> dict[str, dict[str, int]]:
    """Of the backward pass and of the step, at a boundary."""
    layout = LAYOUTS[name]
    counts = {}
    for who in ("DeepSpeed", "distscale"):
        engine = (coordinated if who == "distscale" else plain_engine)(layout, tiny_net())
        one_step(engine, layout, 0)
        loss = engine(torch.ones(3, dtype=HALF[layout.fp16])).float().square().sum()
        with Counting() as backward:
            engine.backward(loss)
        with Counting() as step:
            engine.step()
        counts[who] = {
            "all-reduces of the step": step.all_reduces,
            "host reads of the step": step.host_reads,
            "host reads of backward": backward.host_reads,
        }
    return counts


def refusals() -> dict[str, str]:
    """What coordinate() says of engines that it cannot coordinate, and of mistakes."""
    said = {}

    def note(what: str, engine: Any, **overrides: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            coordinate(engine, **overrides)
        said[what] = str(caught.value)

    note("fp32 zero0", plain_engine(Layout(0, extra={"fp16": {"enabled": False}}), tiny_net()))
    note("not an engine", tiny_net())
    engine = plain_engine(Layout(2), tiny_net())
    note("unknown", engine, growth=3)
    note("floor", engine, min_scale=2.0**20)
    note("reducer", engine, max_consecutive_skips=0)
    assert "step" not in vars(engine.optimizer)
    coordinate(engine)
    note("twice", engine)
    note("bf16", plain_engine(Layout(2, fp16=False), tiny_net()), init_scale=2.0)
    # Last, for DeepSpeed remembers in the process that autocast was once on.
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    note("autocast zero2", plain_engine(Layout(2, extra={**autocast, "fp16": {"enabled": False}}), tiny_net()))
    note("autocast zero0", plain_engine(Layout(0, extra={**autocast, "fp16": {"enabled": False}}), tiny_net()))
    return said


def floor(name: str, rank: int) -> list[str]:
    """Overflows for ever, and NaN losses for ever."""
    layout = LAYOUTS[name]
    said = []
    for event in ("overflow", "loss"):
        engine = coordinated(layout, tiny_net(), {"max_consecutive_skips": 3, "min_scale": 64.0})
        factor = math.nan if event == "loss" and rank == 1 else 1.0
        for _ in range(12):
            inputs = torch.linspace(-1.0, 1.0, 3, dtype=HALF[layout.fp16])
            engine.backward(engine(inputs).float().square().sum() * factor)
            if event == "overflow" and rank == 1:
                spoil(engine, math.inf)
            try:
                engine.step()
            except ScaleExhaustedError as error:
                said.append(str(error))
                break
    return said


def run_all(rank: int) -> dict[tuple[Any, ...], Any]:
    join_ranks()
    seen: dict[tuple[Any, ...], Any] = {}
    for name in LAYOUTS:
        seen["bad", name] = bad_steps(name, rank)
        seen["clipped", name] = clipped(name, rank)
        for check in CHECKS:
            seen["skips", name, check] = wanted_skips(name, check, rank)
        for is_coordinated in (False, True):
            seen["losses", name, is_coordinated] = losses(name, is_coordinated, rank)
    for name in FP16_LAYOUTS:
        seen["floor", name] = floor(name, rank)
        for is_coordinated in (False, True):
            seen["growth", name, is_coordinated] = growth(name, is_coordinated)
    for name in FP16_LAYOUTS:
        seen["cost", name] = cost(name)
    seen["refusals",] = refusals()
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict[tuple[Any, ...], Any]]:
    return run_ranks(run_all, WORLD_SIZE, timeout_s=280.0, take_down=False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_bad_value_on_any_rank_skips_everywhere(name: str, seen: list[Any]) -> None:
    check_bad_steps(name, [results["bad", name] for results in seen])


def check_bad_steps(name: str, on_ranks: list[dict[str, Any]]) -> None:
    assert [results["clean"] for results in on_ranks] == [(True, False)] * WORLD_SIZE
    for outcomes in zip(*(results["bad"] for results in on_ranks), strict=True):
        bad_rank = outcomes[0]["bad_rank"]
        is_held = outcomes[bad_rank]["held"]  # an empty partition cannot hold a bad value
        for outcome in outcomes:
            assert outcome["skipped"] is is_held
            assert outcome["applied"] is not is_held
            if is_held:
                assert outcome["culprit"].rank == bad_rank
                assert outcome["culprit"].kind == outcome["kind"].strip("-")
                assert outcome["culprit"].tensor in dict(tiny_net().named_parameters())
                assert outcome["untouched"]
                assert outcome["counted"] == (1, 1)
                assert outcome["same rate"]
                scale, next_scale, now = outcome["scales"]
                assert now == next_scale == (scale / 2 if LAYOUTS[name].fp16 else 1.0)
        assert len({outcome["scales"] for outcome in outcomes}) == 1
    assert any(outcome["held"] for results in on_ranks for outcome in results["bad"])
    assert [results["after"][0] for results in on_ranks] == [True] * WORLD_SIZE
    assert not all(results["after"][1] for results in on_ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_bitwise_those_of_deepspeed_alone(name: str, seen: list[Any]) -> None:
    if name.startswith("zero0"):
        # DeepSpeed alone divides by a scale that it never applied; see test_growth_steps.
        assert all(results["losses", name, True] != results["losses", name, False] for results in seen)
        return
    for results in seen:
        assert results["losses", name, True] == results["losses", name, False]


@pytest.mark.parametrize("name", FP16_LAYOUTS)
def test_growth_steps(name: str, seen: list[Any]) -> None:
    """DeepSpeed 0.19.8 unscales a step on which the scale grows by the new scale; at stage 0, by one never applied."""
    for results in seen:
        assert results["growth", name, True] == [(1.0, 3.0)] * 3
        alone = results["growth", name, False]
        if LAYOUTS[name].stage == 0:
            assert [moved for moved, _ in alone] == [0.0] * 3  # 1/256
        else:
            norm_of_growth = 1.5 if LAYOUTS[name].stage == 3 else 3.0
            assert alone == [(1.0, 3.0), (1.0, 3.0), (0.5, norm_of_growth)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_and_clipping(name: str, seen: list[Any]) -> None:
    for results in seen:
        reported, ours, moved = results["clipped", name]
        assert reported == pytest.approx(3.0, rel=1e-6)
        assert ours == pytest.approx(3.0, rel=1e-12)
        assert moved == pytest.approx(0.5, rel=1e-3 if LAYOUTS[name].fp16 else 1e-2)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_skips_that_we_want(name: str, check: str, seen: list[Any]) -> None:
    for results in seen:
        assert results["skips", name, check] == [
            ("clean", True, False, None, None, False),
            ("veto", False, True, 1, None, False),
            ("nan loss", False, True, None, (1, "loss"), False),
            ("stop", True, False, None, None, True),
            ("clean", True, False, None, None, True),
        ]


@pytest.mark.parametrize("name", FP16_LAYOUTS)
def test_the_floor_is_an_error_with_its_cause(name: str, seen: list[Any]) -> None:
    for results in seen:
        overflow, loss = results["floor", name]
        assert "3 steps were skipped in a row, since step 2, and the scale, 64, cannot go lower" in overflow
        assert "is inf on rank 1, while the loss is finite" in overflow
        assert "the loss itself is not finite: 3 steps were skipped in a row, since step 0; last it was nan" in loss


@pytest.mark.parametrize("name", FP16_LAYOUTS)
def test_a_step_costs_one_exchange_and_one_read(name: str, seen: list[Any]) -> None:
    for results in seen:
        ours, alone = (results["cost", name][who] for who in ("distscale", "DeepSpeed"))
        assert ours["all-reduces of the step"] == 2  # of one exchange, in flight together
        assert ours["host reads of backward"] == 0
        # At stage 0 DeepSpeed's own norm is read too.
        assert ours["host reads of the step"] == (2 if LAYOUTS[name].stage == 0 else 1)
        assert ours["host reads of the step"] < alone["host reads of the step"]
        if name == "zero2 offload":
            assert alone["host reads of backward"] > 0  # one for each parameter of the partition


def test_what_cannot_be_coordinated_is_refused(seen: list[Any]) -> None:
    said = seen[0]["refusals",]
    assert "GradScaler that DeepSpeed never updates after an overflow" in said["autocast zero2"]
    assert said["autocast zero0"] == said["autocast zero2"]
    assert "ZeRO stage 0 without fp16 or bf16" in said["fp32 zero0"]
    assert said["not an engine"] == "coordinate() takes what deepspeed.initialize() returned, not a Sequential"
    assert said["unknown"].startswith("coordinate() has no 'growth'; it takes init_scale, ")
    assert "init_scale=256 must lie between min_scale=1.04858e+06" in said["floor"]
    assert "max_consecutive_skips=0 is not allowed" in said["reducer"]
    assert said["twice"] == "this engine is coordinated already; engine.distscale is what coordinates it"
    assert "init_scale has no meaning without fp16" in said["bf16"]
