"""FP8 scales as pure functions, and their histories over steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scale_job import Job
from torch import nn
from torch.optim import SGD

from distscale import ConfigError, DesyncError, DistributedGradScaler, LocalReducer, ProtocolError
from distscale.fp8 import CurrentScaling, DelayedScaling, Fp8Scales, convert_to_fp8
from distscale.fp8.meter import Metered
from distscale.fp8.scales import bits_of_amax, scale_of_amax
from ranks import ThreadRanks

E4M3_MAX = 448.0
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
positive = st.floats(min_value=2.0**-149, max_value=torch.finfo(torch.float32).max, width=32, allow_subnormal=True)


@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("power_of_two", [True, False])
@given(amax=positive, margin=st.integers(0, 3))
def test_a_scale_uses_the_format_and_never_leaves_it(
    amax: float, margin: int, power_of_two: bool, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    recipe = DelayedScaling(margin=margin, power_of_two=power_of_two)
    scale = scale_of_amax(torch.tensor(amax), largest, recipe).item()
    assert math.isfinite(scale) and scale > 0 and math.isfinite(1 / scale)
    limit = largest / 2**margin
    assert amax * scale <= limit * (1 + 2**-23)
    if scale not in (2.0**-126, 2.0**126):
        assert amax * scale > limit / 2 * (1 - 2**-23) if power_of_two else amax * scale > limit * (1 - 2**-22)
    if power_of_two:
        assert math.frexp(scale)[0] == 0.5


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_amax_that_says_nothing_leaves_the_scale(amax: float) -> None:
    assert scale_of_amax(torch.tensor(amax), E4M3_MAX, DelayedScaling(), 3.0).item() == 3.0


def test_bits_of_amax() -> None:
    assert bits_of_amax(torch.empty(0, 4)).item() == 0
    assert bits_of_amax(torch.tensor([-3.0, 2.0], dtype=torch.half)).view(torch.float32).item() == 3.0
    assert bits_of_amax(torch.tensor([math.inf, 1.0])).item() == 0x7F800000
    for values in ([1.0, math.nan], [math.nan, math.inf], [-math.nan, 1.0]):
        assert bits_of_amax(torch.tensor(values)).item() > 0x7F800000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fp8_format": "E3M4"}, "fp8_format"),
        ({"margin": -1}, "margin"),
        ({"margin": 1.0}, "margin"),
        ({"power_of_two": 1}, "power_of_two"),
        ({"amax_history_len": 0}, "amax_history_len"),
        ({"amax_compute_algo": "min"}, "amax_compute_algo"),
    ],
)
def test_a_wrong_argument_of_a_recipe_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DelayedScaling(**arguments)


# ---------------------------------------------------------------- driven by a scaler


def run_threads(rank_main: Callable[[int, Any], Any], world_size: int) -> list[Any]:
    return ThreadRanks(world_size).run(lambda reducer: rank_main(reducer.rank, reducer))


def test_one_commit_a_step_over_all_micro_batches() -> None:
    job = Job()
    assert job.scale == [0.0, 0.0, 0.0]
    job.see(3.0, 1.0, 8.0)
    job.see(7.0, 1.0, 16.0)
    job.see(2.0, 1.0, 4.0)
    report = job.step()
    assert dict(report.fp8_amax) == {"layer.input": 7.0, "layer.weight": 1.0, "layer.grad": 2.0}  # 16 / 8
    assert job.histories == {"layer.input": [7.0], "layer.weight": [1.0], "layer.grad": [2.0]}
    # 448 / 7 = 64; 448 / 1 down to a power of two; 57344 / (2 * 8) = 3584, down to 2048.
    assert job.scale == [64.0, 256.0, 2048.0]
    assert job.meter.amax.tolist() == [0, 0, 0]
    job.see(1.0)
    job.step()
    assert job.histories == {"layer.input": [1.0, 7.0], "layer.weight": [1.0], "layer.grad": [2.0]}
    assert job.scale == [64.0, 256.0, 2048.0]  # the largest of the history; what did not run is as it was


def test_histories_forget_and_the_most_recent_counts_alone() -> None:
    jobs = {algo: Job(DelayedScaling(amax_history_len=3, amax_compute_algo=algo)) for algo in ("max", "most_recent")}
    for amax in (7.0, 3.0, 1.0, 2.0):
        for job in jobs.values():
            job.see(amax)
            job.step()
    assert {algo: job.histories["layer.input"] for algo, job in jobs.items()} == {
        algo: [2.0, 1.0, 3.0] for algo in jobs
    }
    assert [job.scale[0] for job in jobs.values()] == [128.0, 128.0]  # 448 / 3, 448 / 2: 149.3 and 224
    jobs["most_recent"].see(0.5)
    jobs["most_recent"].step()
    assert jobs["most_recent"].scale[0] == 512.0


def test_a_change_of_the_loss_scale_leaves_the_history_of_gradients_true() -> None:
    job = Job(growth_interval=1)
    job.see(1.0, 1.0, 8.0)
    job.step()
    assert job.scaler.get_scale() == 16.0
    assert job.histories["layer.grad"] == [1.0]
    assert job.scale == [256.0, 256.0, 2048.0]  # 57344 / 16 = 3584
    job.see(1.0, 1.0, 16.0)
    job.step()
    assert job.histories["layer.grad"] == [1.0, 1.0]
    assert job.scale[2] == 1024.0
    job.scaler.scale(torch.tensor(1.0))
    job.scaler.update(2.0)
    assert job.scale[2] == 16384.0


def test_what_is_not_finite_never_enters() -> None:
    job = Job()
    job.see(7.0, 1.0, 8.0)
    job.step()
    before = (job.histories, job.scale)
    for bad in (math.inf, math.nan):
        job.see(bad, bad, bad)
        report = job.step()
        assert not report.skipped  # the gradient itself is finite
        assert (job.histories, job.scale) == before
    assert not math.isfinite(report.fp8_amax["layer.input"])


def test_a_skipped_step_gives_nothing_to_gradients() -> None:
    job = Job()
    job.see(7.0, 1.0, 8.0)
    job.step()
    job.see(3.0, 2.0, 80.0)
    assert job.step(math.inf).skipped
    assert job.histories == {"layer.input": [3.0, 7.0], "layer.weight": [2.0, 1.0], "layer.grad": [1.0]}
    assert job.scaler.get_scale() == 4.0
    assert job.scale[2] == 8192.0  # 57344 / (1 * 4) = 14336


def test_several_steps_before_one_update_are_one_commit() -> None:
    """The second optimizer comes later, with a table of its own; its part of the step is clean, the first's is not."""
    for is_bad in (False, True):
        job = Job()
        other = nn.Parameter(torch.zeros(1))
        optimizer = SGD([other], lr=1.0)
        job.see(7.0, 1.0, 8.0)
        loss = job.scaler.scale(torch.tensor(1.0))
        job.param.grad = torch.full((2,), math.inf if is_bad else 1.0) * loss
        other.grad = torch.ones(1) * loss
        job.scaler.step(job.optimizer)
        job.see(3.0, 2.0)
        job.scaler.step(optimizer)
        job.scaler.update()
        assert job.scaler.last_step is not None
        assert dict(job.scaler.last_step.fp8_amax) == {"layer.input": 7.0, "layer.weight": 2.0, "layer.grad": 1.0}
        gradient = {} if is_bad else {"layer.grad": [1.0]}
        assert job.histories == {"layer.input": [7.0], "layer.weight": [2.0], **gradient}
        job.step()
        assert job.histories == {"layer.input": [7.0], "layer.weight": [2.0], **gradient}


def test_a_step_that_is_given_up_says_nothing() -> None:
    job = Job()
    job.see(7.0, 1.0, 8.0)
    job.scaler.scale(torch.tensor(1.0))
    told = []
    job.scales.listeners.append(lambda *ends: told.append(tuple(map(float, ends))))
    job.scaler.update(2.0)
    assert told == [(1.0, 8.0, 2.0)]  # as if skipped
    job.see(1.0, 1.0, 2.0)
    job.step()
    assert job.histories == {"layer.input": [1.0], "layer.weight": [1.0], "layer.grad": [1.0]}


def test_current_scaling_remembers_nothing() -> None:
    job = Job(CurrentScaling())
    job.see(7.0, 1.0, 8.0)
    assert job.step().fp8_amax["layer.input"] == 7.0
    assert (job.histories, job.scale) == ({}, [0.0, 0.0, 0.0])


@pytest.mark.parametrize("policy", ["none", "static"])
def test_every_policy(policy: str) -> None:
    job = Job(policy=policy, init_scale=1.0)
    job.see(7.0, 1.0, 8.0)
    job.step()
    assert job.histories == {"layer.input": [7.0], "layer.weight": [1.0], "layer.grad": [8.0]}


# ---------------------------------------------------------------- ranks


def test_ranks_with_different_modules_hold_the_same() -> None:
    """A pipeline: rank 0 has a and shared, rank 1 b and shared; rank 2 has none. Shared runs on one rank."""

    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(reducer=reducer, names=(("a", "shared"), ("b", "shared"), ())[rank])
        seen: list[Any] = []
        for step in range(3):
            if rank == 0:
                job.see(1.0 + step, 2.0, 8.0)
            if rank == 1:
                job.see(5.0, 2.0, 8.0, 3.0, 2.0, 1.0)
            job.step()
            seen.append((job.histories, job.scaler.state_dict()))
        scale = dict(zip([tensor.name for tensor in job.meter.tensors], job.scale, strict=True))
        return seen, scale

    outcomes = run_threads(rank_main, 3)
    assert outcomes[0][0] == outcomes[1][0] == outcomes[2][0]
    histories = outcomes[0][0][-1][0]
    assert histories["a.input"] == [3.0, 2.0, 1.0]
    assert histories["b.input"] == [5.0, 5.0, 5.0]
    assert histories["shared.input"] == [3.0, 3.0, 3.0]
    assert outcomes[0][1]["shared.input"] == outcomes[1][1]["shared.input"] == 128.0


def test_inf_in_what_is_sent_skips_on_all_and_is_named() -> None:
    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(reducer=reducer, max_norm=1.0)
        sent = job.scales.meter([Metered("layer.bias (sent)", is_gradient=True, is_sent=True)])
        reports = []
        for bad in (False, True):
            sent.num_saturated += rank + 1
            sent.record(0, bits_of_amax(torch.tensor(math.inf if bad and rank == 1 else 8.0)))
            job.see(math.inf)
            reports.append(job.step())
        return reports, job.histories, sent.scale.tolist()

    outcomes = run_threads(rank_main, 2)
    assert outcomes[0][1:] == outcomes[1][1:]
    for reports, histories, scale in outcomes:
        assert [report.skipped for report in reports] == [False, True]
        culprit = reports[1].culprit
        assert (culprit.rank, culprit.tensor, culprit.kind) == (1, "layer.bias (sent)", "inf")
        assert dict(reports[1].num_saturated) == {"layer.bias (sent)": 3.0}
        assert reports[0].grad_norm == pytest.approx(2.0**0.5)
        assert histories["layer.bias (sent)"] == [1.0]
        assert scale == [64.0]  # 448 / 4, at the halved loss scale


def test_ranks_with_other_recipes_are_told() -> None:
    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(DelayedScaling(margin=rank), reducer=reducer)
        with pytest.raises(Exception, match="FP8 recipe") as caught:
            job.step()
        return str(caught.value)

    assert all("margin=0" in said and "margin=1" in said for said in run_threads(rank_main, 2))


def test_a_rank_without_fp8_is_told() -> None:
    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(reducer=reducer)
        if rank:
            job.scaler = DistributedGradScaler("cpu", 8.0, growth_interval=1000, reducer=reducer)
        with pytest.raises(
            DesyncError, match=r"FP8 recipe at the first step: .*DelayedScaling.* on rank 0; None on rank 1"
        ):
            job.step()

    run_threads(rank_main, 2)


def test_ranks_that_mean_different_things_by_a_name_are_told() -> None:
    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(reducer=reducer)
        job.scales.meter([Metered("x", is_gradient=rank == 1)])
        with pytest.raises(ProtocolError, match="different FP8 tensors by one name"):
            job.step()

    run_threads(rank_main, 2)


def test_tensors_that_come_later() -> None:
    def rank_main(rank: int, reducer: Any) -> Any:
        job = Job(reducer=reducer)
        job.see(7.0)
        job.step()
        meter = job.scales.meter([Metered("late", is_gradient=False)])
        meter.record(0, bits_of_amax(torch.tensor(2.0 + rank)))
        job.see(3.0)
        job.step()
        return job.histories, meter.scale.tolist()

    for histories, scale in run_threads(rank_main, 2):
        assert (histories["late"], histories["layer.input"]) == ([3.0], [3.0, 7.0])
        assert scale == [128.0]


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="fp8=3"):
        DistributedGradScaler("cpu", fp8=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="enabled=True"):
        DistributedGradScaler("cpu", enabled=False, fp8=Fp8Scales(DelayedScaling()))
    if not torch.cuda.is_available():
        with (
            pytest.warns(UserWarning, match="CUDA is not available"),
            pytest.raises(ConfigError, match=r"device='cuda' disables this one.*give device='cpu'"),
        ):
            DistributedGradScaler(fp8=Fp8Scales(DelayedScaling()))
    with pytest.raises(ConfigError, match="not an FP8 recipe"):
        Fp8Scales("delayed")  # type: ignore[arg-type]
    job = Job()
    with pytest.raises(ConfigError, match=r"layer\.input"):
        job.scales.meter([Metered("layer.input", False)])


def test_a_scaler_that_does_not_know_of_fp8_linears_warns() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    DistributedGradScaler("cpu", names=model, reducer=LocalReducer())
    scales = convert_to_fp8(model, DelayedScaling())
    DistributedGradScaler("cpu", names=model, fp8=scales, reducer=LocalReducer())
    with pytest.warns(UserWarning, match="without fp8="):
        DistributedGradScaler("cpu", names=model, reducer=LocalReducer())
