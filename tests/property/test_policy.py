"""The loss-scale rules and their saved state, against torch's arithmetic and plain-Python rules."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distscale import ConfigError, DistributedGradScaler, DynamicScale, NoScaling, Policy, StaticScale
from distscale.policy import MAX_SCALE, MIN_SCALE, Outcome, ScaleState

many = settings(max_examples=100 * int(os.environ.get("DISTSCALE_EXAMPLES", "1")))

pytestmark = pytest.mark.filterwarnings("ignore:the loaded scaler state changes:UserWarning")

scales = st.floats(-126, 126).map(lambda power: float(np.float32(2.0**power)))
growth_factors = st.floats(1, 16, exclude_min=True)
backoff_factors = st.floats(0, 1, exclude_min=True, exclude_max=True)
intervals = st.integers(1, 30)
flags = st.lists(st.booleans(), min_size=1, max_size=200)
events = st.lists(st.sampled_from(["clean", "clean", "overflow", "lost", "veto", "overflow and lost"]), max_size=200)


def outcome_of(event: str) -> Outcome:
    """As :func:`distscale.exchange.judge` makes it: an overflow does not count as one if the loss was lost."""
    lost = "lost" in event
    return Outcome(*(torch.tensor(flag) for flag in (event == "overflow", lost, event == "clean")))


def start_of(policy: Policy, scale: float | None = None) -> ScaleState:
    scale = policy.init_scale if scale is None else scale
    counts = (torch.tensor(count, dtype=torch.int32) for count in (0, policy.hysteresis, 0))
    return ScaleState(torch.tensor(scale, dtype=torch.float32), *counts)


@st.composite
def dynamic_rules(draw: st.DrawFn) -> DynamicScale:
    low, start, high = sorted(draw(st.tuples(scales, scales, scales)))
    return DynamicScale(
        start,
        draw(growth_factors),
        draw(backoff_factors),
        draw(intervals),
        draw(st.integers(1, 5)),
        low,
        high,
        draw(st.none() | st.integers(2, 5)),
        draw(st.integers(0, 3)),
    )


@many
@given(scales, growth_factors, backoff_factors, intervals, flags)
def test_trajectory_is_torchs(scale: float, growth: float, backoff: float, interval: int, found: list[bool]) -> None:
    rule = DynamicScale(scale, growth, backoff, interval)
    state = start_of(rule)
    torch_scale, torch_tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
    for is_bad in found:
        torch._amp_update_scale_(torch_scale, torch_tracker, torch.tensor(float(is_bad)), growth, backoff, interval)
        if not MIN_SCALE <= torch_scale.item() <= MAX_SCALE:
            return  # torch goes on to zero or infinity, which is C10 and C11
        state = rule.next_state(state, outcome_of("overflow" if is_bad else "clean"))
        assert state.scale.item() == torch_scale.item()
        assert state.growth_tracker.item() == torch_tracker.item()


@given(growth_factors, backoff_factors, st.integers(1, 5), st.lists(st.booleans(), min_size=200, max_size=200))
@settings(max_examples=10)
def test_scaler_follows_torchs_scaler(growth: float, backoff: float, interval: int, found: list[bool]) -> None:
    arguments = ("cpu", 2.0**16, growth, backoff, interval)
    ours, theirs = DistributedGradScaler(*arguments), torch.amp.GradScaler(*arguments)
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    for is_bad in found:
        for scaler, parameter in zip((ours, theirs), parameters, strict=True):
            optimizer = torch.optim.SGD([parameter], lr=0.5)
            slope = torch.tensor([1.0, math.inf if is_bad else 2.0])
            # Not from the loss: a non-finite loss is not torch's business, and keeps our scale.
            scaler.scale(parameter.sum()).backward()
            assert parameter.grad is not None
            parameter.grad.mul_(slope)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if not 2.0**-100 < theirs.get_scale() < 2.0**100:
            break
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
        # The reciprocal is rounded alike, so the parameters are equal too.
        assert torch.equal(*parameters)


@many
@given(dynamic_rules(), events)
def test_scale_stays_within_its_bounds(rule: DynamicScale, happened: list[str]) -> None:
    state = start_of(rule)
    for event in happened:
        before, state = state, rule.next_state(state, outcome_of(event))
        assert rule.min_scale <= state.scale.item() <= rule.max_scale
        assert math.isfinite(1 / state.scale.item())
        assert 0 <= state.growth_tracker.item() < rule.growth_interval + rule.growth_delay
        assert 0 <= state.hysteresis_tracker.item() <= rule.hysteresis
        if event in ("veto", "lost", "overflow and lost"):
            assert state.scale.item() == before.scale.item()
            assert state.hysteresis_tracker.item() == before.hysteresis_tracker.item()


@many
@given(dynamic_rules(), flags)
def test_hysteresis_is_megatrons(rule: DynamicScale, found: list[bool]) -> None:
    rule = replace(rule, hysteresis_refill=None, growth_delay=0)
    scale, growth_tracker, hysteresis_tracker = np.float32(rule.init_scale), 0, rule.hysteresis
    state = start_of(rule)
    for is_bad in found:
        if is_bad:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = np.float32(max(float(scale) * rule.backoff_factor, rule.min_scale))
        else:
            growth_tracker += 1
            if growth_tracker == rule.growth_interval:
                growth_tracker = 0
                hysteresis_tracker = rule.hysteresis
                scale = np.float32(min(float(scale) * rule.growth_factor, rule.max_scale))
        state = rule.next_state(state, outcome_of("overflow" if is_bad else "clean"))
        assert state.scale.item() == float(scale)
        assert state.growth_tracker.item() == growth_tracker
        assert state.hysteresis_tracker.item() == max(hysteresis_tracker, 0)


@many
@given(dynamic_rules(), st.integers(2, 5), flags)
def test_tolerance_returns_after_a_clean_run(rule: DynamicScale, refill: int, found: list[bool]) -> None:
    rule = replace(rule, hysteresis_refill=refill)
    state = start_of(rule)
    run_length = tolerated = 0
    for is_bad in found:
        before, state = state, rule.next_state(state, outcome_of("overflow" if is_bad else "clean"))
        run_length = 0 if is_bad else run_length + 1
        has_grown = not is_bad and state.growth_tracker.item() <= before.growth_tracker.item()
        if run_length >= refill or has_grown:
            tolerated = 0
        tolerated += is_bad
        assert state.hysteresis_tracker.item() == max(rule.hysteresis - tolerated, 0)
        if is_bad and tolerated < rule.hysteresis:
            assert state.scale.item() == before.scale.item()


def test_a_scale_at_which_every_other_step_overflows_is_lowered() -> None:
    rule = DynamicScale(2.0**16, hysteresis=2, hysteresis_refill=2)
    state = start_of(rule)
    for event in ["overflow", "clean"] * 4:
        state = rule.next_state(state, outcome_of(event))
    assert state.scale.item() == 2.0**13
    with pytest.raises(ConfigError, match="hysteresis_refill=1 is not allowed: it must be a whole number from 2 to"):
        replace(rule, hysteresis_refill=1)


@many
@given(st.one_of(dynamic_rules(), st.just(StaticScale(2.0**10)), st.just(NoScaling())), events)
def test_blocked_steps_are_those_that_no_scale_can_save(rule: Policy, happened: list[str]) -> None:
    state = start_of(rule)
    blocked = 0
    for event in happened:
        cannot_fall = not isinstance(rule, DynamicScale) or (
            state.scale.item() <= rule.min_scale and state.hysteresis_tracker.item() <= 1
        )
        if event == "clean":
            blocked = 0
        elif "lost" in event or (event == "overflow" and cannot_fall):
            blocked += 1
        state = rule.next_state(state, outcome_of(event))
        assert state.blocked_steps.item() == blocked
        if not isinstance(rule, DynamicScale):
            assert state.scale.item() == rule.init_scale


# ---------------------------------------------------------------- the saved state


def scaler_of(rule: Policy) -> DistributedGradScaler:
    return DistributedGradScaler("cpu", policy=rule)


def run(scaler: DistributedGradScaler, happened: list[str]) -> list[tuple[float, int]]:
    """Steps of a real optimizer; returns scale and growth tracker after each."""
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    trajectory = []
    for event in happened:
        scaler.scale(parameter.sum() + (math.nan if "lost" in event else 0.0))
        parameter.grad = torch.tensor([math.inf if "overflow" in event else 0.0])
        if event == "veto":
            scaler.veto("test")
        scaler.step(optimizer)
        scaler.update()
        trajectory.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return trajectory


def through_torch_save(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


short_events = st.lists(st.sampled_from(["clean", "clean", "clean", "overflow", "lost", "veto"]), max_size=12)
rules = st.one_of(dynamic_rules(), scales.map(StaticScale), st.just(NoScaling()))


@many
@given(rules, rules, short_events, short_events, st.booleans())
def test_every_field_round_trips(
    rule: Policy, other: Policy, before: list[str], after: list[str], has_run: bool
) -> None:
    # C29: also into a scaler that was made with another rule and has run.
    assume(rule.name == other.name)
    first, second = scaler_of(rule), scaler_of(other)
    run(first, before)
    if has_run:
        run(second, ["clean", "overflow", "clean"])
    saved = first.state_dict()
    second.load_state_dict(through_torch_save(saved))
    assert second.state_dict() == saved
    assert second.get_scale() == first.get_scale()  # C19: before any scale()
    assert run(second, after) == run(first, after)
    assert second.state_dict() == first.state_dict()


@many
@given(dynamic_rules(), short_events, short_events)
def test_torchs_scaler_loads_the_state_and_gives_it_back(
    rule: DynamicScale, before: list[str], after: list[str]
) -> None:
    ours = scaler_of(rule)
    run(ours, before)
    saved = ours.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(saved)
    assert theirs.state_dict().items() <= saved.items()

    back = DistributedGradScaler("cpu", min_scale=rule.min_scale, max_scale=rule.max_scale, init_scale=rule.init_scale)
    back.load_state_dict(through_torch_save(theirs.state_dict()))
    assert theirs.state_dict().items() <= back.state_dict().items()
    # torch saves no hysteresis: it is taken for full, and so are the counters for zero.
    fresh = {"hysteresis": 1, "hysteresis_tracker": 1, "hysteresis_refill": None, "growth_delay": 0}
    fresh |= {"blocked_steps": 0, "step": 0}
    assert back.state_dict() == {**saved, **fresh}


Breaking = Callable[[dict[str, Any]], None]


def _without(key: str) -> Breaking:
    return lambda state: state.pop(key)


def _with(key: str, value: object) -> Breaking:
    return lambda state: state.__setitem__(key, value)


TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
TRACKERS = ("_growth_tracker", "hysteresis_tracker", "blocked_steps", "step")
COUNTS = (*TRACKERS, "growth_interval", "hysteresis", "growth_delay")
NUMBERS = ("scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
BROKEN: list[Breaking] = [
    lambda state: state.clear(),
    *(_without(key) for key in TORCH_KEYS),
    *(_with(key, value) for key in COUNTS for value in (-1, 1.5, True, None, "3", 2**31, 2**70)),
    *(_with(key, value) for key in NUMBERS for value in (0.0, -1.0, math.inf, math.nan, True, None, "3", [1.0])),
    *(_with(key, 1e300) for key in ("scale", "min_scale", "max_scale")),
    *(_with(key, 0) for key in ("growth_interval", "hysteresis")),
    *(_with("hysteresis_refill", value) for value in (0, 1, 2.5, True, "3", 2**31)),
    _with("growth_factor", 1.0),
    _with("backoff_factor", 1.0),
    _with("scale", 2.0**41),
    _with("scale", 2.0**-11),
    _with("version", 2),
    _with("version", "1"),
    _with("version", None),
    _with("policy", "static"),
    _with("policy", "adaptive"),
    _with("policy", None),
]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("index", range(len(BROKEN)))
def test_a_state_that_cannot_be_used_changes_nothing(index: int, has_run: bool) -> None:
    rule = DynamicScale(2.0**16, growth_interval=4, hysteresis=2, min_scale=2.0**-10, max_scale=2.0**40)
    source = scaler_of(rule)
    run(source, ["clean", "overflow", "lost"])
    broken = source.state_dict()
    BROKEN[index](broken)
    given_to_it = copy.deepcopy(broken)

    scaler, twin = (scaler_of(DynamicScale(2.0**12, growth_interval=3, hysteresis=3)) for _ in range(2))
    if has_run:
        run(scaler, ["clean", "overflow"])
        run(twin, ["clean", "overflow"])
    with pytest.raises(ConfigError):
        scaler.load_state_dict(broken)
    assert repr(broken) == repr(given_to_it)
    assert scaler.state_dict() == twin.state_dict()
    assert run(scaler, ["clean"] * 4 + ["overflow"]) == run(twin, ["clean"] * 4 + ["overflow"])
