"""The saved state of FP8 scales: back bitwise, on other ranks, with another length; refused for another recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from scale_job import Job
from torch import nn
from torch.optim import SGD

from distscale import ConfigError, DistributedGradScaler, LocalReducer
from distscale.fp8 import CurrentScaling, DelayedScaling, Fp8Scales, Recipe, convert_to_fp8
from distscale.fp8.meter import Metered
from distscale.fp8.scales import bits_of_amax
from ranks import ThreadRanks

common = {
    "fp8_format": st.sampled_from(["E4M3", "E5M2", "HYBRID"]),
    "margin": st.integers(0, 2),
    "power_of_two": st.booleans(),
}
recipes = st.one_of(
    st.builds(CurrentScaling, **common),  # type: ignore[arg-type]
    st.builds(
        DelayedScaling,
        **common,  # type: ignore[arg-type]
        amax_history_len=st.integers(1, 4),
        amax_compute_algo=st.sampled_from(["max", "most_recent"]),
    ),
)


def _trained() -> Job:
    job = Job()
    for amax in (7.0, 3.0, 1.0):
        job.see(amax, 2.0, 8.0 * amax)
        job.step()
    return job


def test_scales_come_back_before_the_first_step() -> None:
    old = _trained()
    state = json.loads(json.dumps(old.scaler.state_dict()))
    new = Job()
    new.scaler.load_state_dict(state)
    assert new.scale == old.scale
    for job in (old, new):
        job.see(1.0, 2.0, 3.0)
        job.step()
    assert new.scaler.state_dict() == old.scaler.state_dict()
    assert new.scale == old.scale


def test_scales_come_back_on_other_ranks() -> None:
    state = _trained().scaler.state_dict()

    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(reducer=reducer, names=("layer",) if rank else ())
        job.scaler.load_state_dict(state)
        job.see(*(1.0, 2.0, 3.0) if rank else ())
        job.step()
        return job.histories

    alone = Job()
    alone.scaler.load_state_dict(state)
    alone.see(1.0, 2.0, 3.0)
    alone.step()
    assert ThreadRanks(3).run(lambda reducer: rank_main(reducer.rank, reducer)) == [alone.histories] * 3


@pytest.mark.parametrize(("length", "expected"), [(2, [1.0, 3.0]), (8, [1.0, 3.0, 7.0])])
def test_another_length_keeps_the_newest(length: int, expected: list[float]) -> None:
    job = Job(DelayedScaling(amax_history_len=length))
    job.scaler.load_state_dict(_trained().scaler.state_dict())
    job.step()
    assert job.histories["layer.input"] == expected


DELAYED = {"fp8_format": "HYBRID", "margin": 0, "power_of_two": True, "amax_compute_algo": "max"}
OTHER = {"fp8_format": "E4M3", "margin": 2, "power_of_two": False, "amax_compute_algo": "most_recent"}


@pytest.mark.parametrize("field", OTHER)
def test_each_field_of_another_recipe_is_an_error_or_a_reset(field: str) -> None:
    """Of the scaler, of which nothing changes then; through ``scales`` and, without the histories, through itself."""
    state = _trained().scaler.state_dict() | {"scale": 64.0}
    job = Job(DelayedScaling(**{field: OTHER[field]}))  # type: ignore[arg-type]
    job.see(5.0, 2.0, 8.0)
    job.step()
    before, scale = job.scaler.state_dict(), job.scale
    both = rf"{field}={DELAYED[field]!r} in the state, {field}={OTHER[field]!r} here"
    for load, whole in ((job.scaler.load_state_dict, state), (job.scales.load_state_dict, state["fp8"])):
        with pytest.raises(ConfigError, match=rf"another recipe: {both}\. .*without its 'fp8'.*reset=True"):
            load(whole)
        assert (job.scaler.state_dict(), job.scale) == (before, scale)
    job.scaler.load_state_dict({key: value for key, value in state.items() if key != "fp8"})
    assert (job.scaler.get_scale(), job.histories, job.scale) == (64.0, {}, [0.0, 0.0, 0.0])
    job.see(5.0)
    job.step()
    assert job.scale[0] > 0
    job.scales.load_state_dict(state["fp8"], reset=True)
    assert (job.histories, job.scale) == ({}, [0.0, 0.0, 0.0])


def test_a_reset_forgets_the_scales_of_all_ranks_and_of_what_is_sent() -> None:
    state = _trained().scales.state_dict()

    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(DelayedScaling(margin=2), reducer=reducer)
        sent = job.scales.meter([Metered("layer.bias (sent)", is_gradient=True, is_sent=True)])
        found = []
        for factor in (1.0, 100.0):
            job.see(factor * (1 + rank), 2.0, 8.0)
            sent.record(0, bits_of_amax(torch.tensor(8.0 * factor)))
            job.step()
            found.append((job.histories, job.scale, sent.scale.tolist()))
            job.scales.load_state_dict(state, reset=True)
            found.append((job.histories, job.scale, sent.scale.tolist()))
        return found

    ranks = ThreadRanks(2).run(lambda reducer: rank_main(reducer.rank, reducer))
    assert ranks[0] == ranks[1]
    forgotten = ({}, [0.0, 0.0, 0.0], [0.0])
    # 448 / 2 and 448 / 200, over 4 for the margin: 56 and 0.56, down to powers of two.
    assert [found[1][:1] for found in ranks[0]] == [[32.0], [0.0], [0.5], [0.0]]
    assert (ranks[0][1], ranks[0][3]) == (forgotten, forgotten) and ranks[0][2][2] == [0.125]


def test_a_batch_of_another_size_after_a_reset_is_not_cut_off() -> None:
    model, scales, scaler = _converted(DelayedScaling(margin=2))
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    optimizer = SGD(model.parameters(), lr=0.0)
    scaler.scale(model(inputs).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.load_state_dict(_trained().scales.state_dict(), reset=True)
    exact = nn.functional.linear(100 * inputs, model[0].weight, model[0].bias)
    assert (model(100 * inputs) - exact).norm() < 0.1 * exact.norm()


def test_scales_alone_hand_out_nothing_until_they_are_told_the_loss_scale() -> None:
    old = _trained()
    for job in (Job(), _trained()):  # in a new process, and in one that goes back
        job.see(1000.0, 1000.0, 1000.0)
        job.scales.load_state_dict(old.scales.state_dict())
        assert (job.scale, job.meter.amax.tolist()) == ([0.0, 0.0, 0.0], [0, 0, 0])
        job.scales.hand_out(torch.tensor(old.scaler.get_scale()))
        assert job.scale == old.scale and all(job.scale)


def test_scales_that_are_saved_apart_are_loaded_after_the_scaler() -> None:
    old, new = _trained(), Job(init_scale=2.0)
    rest = old.scaler.state_dict()
    apart = rest.pop("fp8")
    new.scaler.load_state_dict(rest)
    new.scales.load_state_dict(apart)
    new.scales.hand_out(torch.tensor(new.scaler.get_scale()))
    assert (new.scaler.state_dict(), new.scale) == (old.scaler.state_dict(), old.scale)
    new.scaler.load_state_dict(rest)
    assert (new.histories, new.scale) == ({}, [0.0, 0.0, 0.0])


def test_scales_that_were_not_handed_out_are_left_alone() -> None:
    """Such as those of the pretraining example that are all 1, beside which it trains for comparison."""
    job = Job(CurrentScaling())
    job.meter.scale.fill_(1.0)
    state = job.scaler.state_dict()
    for load in (state, {key: value for key, value in state.items() if key != "fp8"}):
        job.scaler.load_state_dict(load)
        assert job.scale == [1.0, 1.0, 1.0]


def test_what_is_registered_after_a_load_has_its_scales_from_the_next() -> None:
    """A model that is converted, or sends its gradients, later; with the ranks agreed before, and without."""

    def register(job: Job) -> list[Any]:
        critic = job.scales.meter([Metered("critic.input", is_gradient=False)])
        return [critic, job.scales.meter([Metered("layer.bias (sent)", is_gradient=True, is_sent=True)])]

    def see(job: Job, late: list[Any]) -> None:
        job.see(7.0, 2.0, 8.0)
        for meter in late:
            meter.record(0, bits_of_amax(torch.tensor(8.0)))
        job.step()

    def rank_main(rank: int, reducer: Any) -> Any:
        old = Job(reducer=reducer)
        late = register(old)
        see(old, late)
        both, scale = old.scaler.state_dict(), [old.scale, *(meter.scale.tolist() for meter in late)]
        for steps in (0, 1):
            job = Job(reducer=reducer, names=("layer", f"of_rank{rank}"))
            job.scaler.load_state_dict(both)
            for _ in range(steps):
                job.step()
            late = register(job)
            job.scaler.load_state_dict(both)
            assert [job.scale[:3], *(meter.scale.tolist() for meter in late)] == scale
            assert job.scaler.state_dict() == both
            see(job, late)
            assert job.histories["critic.input"] == [8.0, 8.0]
            assert job.histories["layer.bias (sent)"] == [1.0, 1.0]
        return job.histories, scale

    ranks = ThreadRanks(2).run(lambda reducer: rank_main(reducer.rank, reducer))
    assert ranks[0] == ranks[1] and all(value for values in ranks[0][1] for value in values)


@given(saved=recipes, mine=recipes)
def test_histories_go_on_under_their_own_recipe_alone(saved: Recipe, mine: Recipe) -> None:
    """Whatever the recipes: what differs is named, and nothing else; of a length alone the newest entries are kept."""
    history = [3.0, 1.0, 2.0]
    old, new = Fp8Scales(saved), Fp8Scales(mine)
    for scales in (old, new):
        scales.meter([Metered("x", is_gradient=False)])
        scales.agree([scales.tensors], torch.device("cpu"))
    for amax in reversed(history):
        bits = bits_of_amax(torch.tensor([amax]))
        old.commit(bits.view(1), torch.tensor(0.0), torch.tensor(1.0))
    both = (saved.as_dict(), mine.as_dict())
    is_same_kind = type(saved) is type(mine)
    differing = {key for key in both[0].keys() & both[1].keys() if both[0][key] != both[1][key]}
    differing -= {"amax_history_len"}
    if differing:
        with pytest.raises(ConfigError) as caught:
            new.load_state_dict(old.state_dict())
        named = {key for key in both[0] | both[1] if f"{key}=" in str(caught.value)}
        assert named == differing and is_same_kind != ("recipe" in named)
        new.load_state_dict(old.state_dict(), reset=True)
        assert json.loads(new.state_dict()["amax_history"]) == {}
        return
    for reset in (False, True):
        new.load_state_dict(old.state_dict(), reset=reset)
        lengths = [recipe.amax_history_len for recipe in (saved, mine) if isinstance(recipe, DelayedScaling)]
        kept = json.loads(new.state_dict()["amax_history"])
        assert kept == ({"x": history[: min(lengths)]} if lengths else {})


@pytest.mark.parametrize("without", [*DELAYED, "amax_history_len", "recipe"])
def test_a_recipe_that_lacks_a_field_is_another_one(without: str) -> None:
    """Nobody can say what was meant; not even by the default of today."""
    job = Job()
    fp8 = _trained().scales.state_dict()
    recipe = json.loads(fp8["recipe"])
    there = recipe.pop(without)
    fp8["recipe"] = json.dumps(recipe)
    with pytest.raises(ConfigError, match=rf"another recipe: no {without} in the state, {without}={there!r} here\. "):
        job.scales.load_state_dict(fp8)
    job.scales.load_state_dict(fp8, reset=True)
    assert job.histories == {}
    fp8["recipe"] = json.dumps(recipe | {without: there, "block": 32})
    with pytest.raises(ConfigError, match="another recipe: block=32 in the state, no block here"):
        job.scales.load_state_dict(fp8)


def _converted(recipe: Recipe) -> tuple[nn.Sequential, Fp8Scales, DistributedGradScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8))
    scales = convert_to_fp8(model, recipe)
    return model, scales, DistributedGradScaler("cpu", 8.0, names=model, fp8=scales, reducer=LocalReducer())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # meant
@pytest.mark.parametrize("recipe", [DelayedScaling(margin=1), DelayedScaling("E4M3"), CurrentScaling()])
def test_the_scales_of_a_model_through_a_distributed_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    model, scales, scaler = _converted(DelayedScaling())
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    dcp.save({"scaler": scaler}, checkpoint_id=tmp_path, no_dist=True)
    _, again, same = _converted(DelayedScaling())
    dcp.load({"scaler": same}, checkpoint_id=tmp_path, no_dist=True)
    assert again.state_dict() == scales.state_dict() and json.loads(again.state_dict()["amax_history"])
    assert torch.equal(again.meters[0].scale, scales.meters[0].scale) and again.meters[0].scale.all()
    _, others, other = _converted(recipe)
    before = other.state_dict()
    with pytest.raises(ConfigError, match="the saved FP8 scales are of another recipe"):
        dcp.load({"scaler": other}, checkpoint_id=tmp_path, no_dist=True)
    assert other.state_dict() == before
    state = {"scaler": other.state_dict()}
    del state["scaler"]["fp8"]
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["scaler"])
    assert other.state_dict() == {**scaler.state_dict(), "fp8": before["fp8"]}
    assert not others.meters[0].scale.any()


def test_a_state_is_taken_back_in_the_same_process() -> None:
    job = _trained()
    state, scale = job.scaler.state_dict(), job.scale
    job.see(1000.0, 1000.0, 1000.0)
    job.scaler.load_state_dict(state)
    assert job.scale == scale
    job.step()
    assert job.histories == json.loads(state["fp8"]["amax_history"])
    without = DistributedGradScaler("cpu", init_scale=32.0, growth_interval=1000, reducer=LocalReducer()).state_dict()
    job.scaler.load_state_dict(without)
    assert (job.histories, job.scale) == ({}, [0.0, 0.0, 0.0])


def test_histories_of_tensors_that_are_not_there_are_kept() -> None:
    state = _trained().scaler.state_dict()
    job = Job(names=("other",))
    job.scaler.load_state_dict(state)
    job.see(5.0)
    job.step()
    assert job.histories == {**json.loads(state["fp8"]["amax_history"]), "other.input": [5.0]}


def test_a_state_of_a_run_without_fp8_and_of_one_with() -> None:
    plain = DistributedGradScaler("cpu", init_scale=32.0, growth_interval=1000, reducer=LocalReducer())
    job = Job()
    job.scaler.load_state_dict(plain.state_dict())
    assert (job.scaler.get_scale(), job.histories) == (32.0, {})
    with pytest.raises(ConfigError, match="made without fp8="):
        plain.load_state_dict(job.scaler.state_dict())


RECIPE = DelayedScaling("HYBRID", amax_history_len=4).as_dict()


@pytest.mark.parametrize(
    "broken",
    [
        "{}",
        {"recipe": "{}"},
        {"recipe": "nothing", "amax_history": "{}"},
        {"amax_history": '{"layer.input": [-1.0]}'},
        {"amax_history": '{"layer.input": [NaN]}'},
        {"amax_history": '{"layer.input": [1e39]}'},
        {"amax_history": '{"layer.input": 1.0}'},
        {"amax_history": "[]"},
        {"amax_history": '{"layer.input": [1' + "0" * 400 + "]}"},
        {"amax_history": '{"layer.input": [1' + "0" * 5000 + "]}"},
        {"amax_history": "[" * 100_000},
        {"amax_history": b"{\xff}"},
        {"recipe": json.dumps(RECIPE | {"amax_history_len": "x"})},
        {"recipe": json.dumps(RECIPE | {"amax_history_len": -3})},
        {"recipe": json.dumps(RECIPE | {"amax_history_len": True})},
    ],
)
def test_an_impossible_state_changes_nothing(broken: Any) -> None:
    job = Job()
    state = job.scaler.state_dict()
    whole = state["fp8"] | broken if isinstance(broken, dict) and len(broken) == 1 else broken
    with pytest.raises(ConfigError, match="FP8 scales"):
        job.scaler.load_state_dict({**state, "scale": 64.0, "fp8": whole})
    assert job.scaler.state_dict() == state


def test_whole_numbers_are_read_as_well() -> None:
    job = Job()
    fp8 = job.scales.state_dict() | {"amax_history": '{"layer.input": [1000000000000000000000000000000, 2]}'}
    job.scales.load_state_dict(fp8)
    assert job.histories == {"layer.input": [torch.tensor(1e30).item(), 2.0]}
