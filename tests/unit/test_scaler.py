"""DistributedGradScaler in one process: the order of calls, what is refused, and what a caller can see."""

import copy
import io
import math
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distscale import (
    ConfigError,
    Culprit,
    DistributedGradScaler,
    DynamicScale,
    LocalReducer,
    ProtocolError,
    ScaleExhaustedError,
    StepReport,
)
from distscale.record import HostCopy
from distscale.sweep import scale_

BAD = [math.inf, -math.inf, math.nan]


def sgd(*values: float, dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    parameter = nn.Parameter(torch.tensor(values, dtype=dtype))
    return parameter, torch.optim.SGD([parameter], **{"lr": 1.0, **kwargs})


def train_step(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor, bad: float = 0.0
) -> None:
    """One step; ``bad`` replaces the last value of the first gradient."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if bad:
        optimizer.param_groups[0]["params"][0].grad.view(-1)[-1] = bad
    scaler.step(optimizer)
    scaler.update()


_OPEN_MPI = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}


class TestConstructor:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"init_scale": 0.0},
            {"init_scale": -1.0},
            {"init_scale": math.inf},
            {"init_scale": math.nan},
            {"init_scale": 2.0**-130},
            {"backoff_factor": 1.0},
            {"backoff_factor": 0.0},
            {"growth_factor": 1.0},
            {"growth_factor": math.nan},
            {"growth_interval": 0},
            {"growth_interval": 2.5},
            {"hysteresis": 0},
            {"hysteresis_refill": 1},
            {"growth_delay": -1},
            {"min_scale": 0.0},
            {"max_scale": math.inf},
            {"max_norm": 0.0},
            {"max_norm": math.nan},
            {"max_consecutive_skips": 0},
            {"max_consecutive_skips": "3"},
            {"init_scale": "65536"},
            {"max_norm": "1"},
            {"max_norm": True},
            {"on_step": 5},
        ],
        ids=str,
    )
    def test_out_of_range_is_a_value_error_that_names_the_argument(self, arguments: dict[str, Any]) -> None:
        # C13
        (name,) = arguments
        with pytest.raises(ValueError, match=rf"{name}=.* not allowed: ") as error:
            DistributedGradScaler("cpu", **arguments)
        assert isinstance(error.value, ConfigError)

    @pytest.mark.parametrize("bounds", [{"min_scale": 2.0**17}, {"max_scale": 2.0**15}])
    def test_start_outside_the_bounds(self, bounds: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="init_scale=65536 must lie between"):
            DistributedGradScaler("cpu", **bounds)

    def test_combinations_that_cannot_be_meant(self) -> None:
        with pytest.raises(ConfigError, match=r"policy='adaptive' is unknown"):
            DistributedGradScaler("cpu", policy="adaptive")
        for policy in (5, DynamicScale):
            with pytest.raises(ConfigError, match="neither a name nor a policy object"):
                DistributedGradScaler("cpu", policy=policy)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="not both"):
            DistributedGradScaler("cpu", policy=DynamicScale(), init_scale=2.0)
        with pytest.raises(ConfigError, match="not both"):
            DistributedGradScaler("cpu", reducer=LocalReducer(), process_group=object())  # type: ignore[arg-type]

    def test_is_torchs_class_with_torchs_arguments_in_place(self) -> None:
        scaler = DistributedGradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
        assert isinstance(scaler, torch.amp.GradScaler)
        assert scaler.get_scale() == 8.0  # C19: before the first scale()
        assert scaler.get_growth_factor() == 3.0
        assert scaler.get_backoff_factor() == 0.25
        assert scaler.get_growth_interval() == 7
        assert scaler.is_enabled()

    def test_setters_are_checked(self) -> None:
        scaler = DistributedGradScaler("cpu")
        scaler.set_growth_interval(3)
        assert scaler.get_growth_interval() == 3
        with pytest.raises(ConfigError, match=r"growth_factor=0.5 is not allowed"):
            scaler.set_growth_factor(0.5)
        assert scaler.get_growth_factor() == 2.0
        with pytest.raises(ConfigError, match="no meaning with policy 'static'"):
            DistributedGradScaler("cpu", policy="static").set_backoff_factor(0.1)


class TestScale:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_multiplies_in_fp32(self, dtype: torch.dtype) -> None:
        scaled = DistributedGradScaler("cpu").scale(torch.tensor(1.5, dtype=dtype))
        assert scaled.dtype is torch.float32
        assert scaled.item() == 1.5 * 65536  # fp16 itself ends at 65504

    def test_containers_keep_their_type(self) -> None:
        scaler = DistributedGradScaler("cpu", init_scale=2.0)
        scaled = scaler.scale([torch.ones(1), (torch.ones(2).double(),)])
        assert isinstance(scaled, list)
        assert isinstance(scaled[1], tuple)
        assert scaled[1][0].dtype is torch.float64
        assert scaled[1][0].tolist() == [2.0, 2.0]
        with pytest.raises(ConfigError, match="got a float"):
            scaler.scale(1.0)

    @pytest.mark.parametrize("bad", BAD)
    def test_loss_that_is_not_finite_skips_and_keeps_the_scale(self, bad: float) -> None:
        # C37
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        train_step(scaler, optimizer, parameter.sum() * bad)
        report = scaler.last_step
        assert report is not None
        assert report.skipped
        assert report.culprit == Culprit(0, "loss", "nan" if math.isnan(bad) else "inf")
        assert (report.scale, report.next_scale) == (65536.0, 65536.0)
        assert parameter.item() == 1.0

    def test_a_finite_loss_that_the_scale_makes_infinite_lowers_the_scale(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", init_scale=2.0**100)
        train_step(scaler, optimizer, (parameter * 1e20).sum())
        assert scaler.last_step is not None
        assert scaler.last_step.culprit is not None
        assert scaler.last_step.culprit.tensor != "loss"
        assert scaler.get_scale() == 2.0**99


class TestStep:
    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("arguments", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
    @pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p, **kw: torch.optim.SGD(p, momentum=0.9, **kw)])
    @pytest.mark.parametrize("when", [0, 2])
    def test_skip_leaves_parameters_and_optimizer_state_untouched(
        self, make: Callable[..., torch.optim.Optimizer], arguments: dict[str, Any], bad: float, when: int
    ) -> None:
        # C34, and G2: also in the first step, when the state does not exist yet. torch's fused SGD then keeps
        # uninitialized memory as its momentum.
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = make(model.parameters(), lr=0.1, **arguments)
        scaler = DistributedGradScaler("cpu", max_norm=1.0)
        x = torch.randn(4, 5)
        for _ in range(when):
            train_step(scaler, optimizer, model(x).square().mean())
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train_step(scaler, optimizer, model(x).square().mean(), bad)
        assert scaler.last_step is not None
        assert scaler.last_step.skipped
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
        train_step(scaler, optimizer, model(x).square().mean())
        assert not scaler.last_step.skipped
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert not torch.equal(model[0].weight, before[0]["0.weight"])

    def test_fused_path_never_asks_the_host(self) -> None:
        # G4, counted at the dispatcher: what reads a value from a tensor goes through these operators.
        counts = {}
        for fused in (True, False):
            parameter, optimizer = sgd(1.0, 2.0, momentum=0.9, fused=fused)
            scaler = DistributedGradScaler("cpu", max_norm=1.0)
            for _ in range(2):
                train_step(scaler, optimizer, parameter.sum())
            with CountHostReads() as reads:
                optimizer.zero_grad()
                scaler.scale(parameter.sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            counts[fused] = reads.count
        assert counts[True] == 0

    def test_several_optimizers_step_all_or_none(self) -> None:
        first, first_optimizer = sgd(1.0)
        second, second_optimizer = sgd(1.0, fused=True)
        scaler = DistributedGradScaler("cpu", init_scale=4.0)
        for bad in (0.0, math.inf):
            scaler.scale((first + second).sum()).backward()
            if bad:
                second.grad.fill_(bad)  # type: ignore[union-attr]
            scaler.step(first_optimizer, second_optimizer)
            scaler.update()
            assert (first.item(), second.item()) == (0.0, 0.0)
            first_optimizer.zero_grad()
            second_optimizer.zero_grad()
        assert scaler.get_scale() == 2.0

    def test_a_parameter_of_two_optimizers_is_unscaled_once(self) -> None:
        parameter = nn.Parameter(torch.tensor([10.0]))
        optimizers = [torch.optim.SGD([parameter], lr=1.0) for _ in range(2)]
        scaler = DistributedGradScaler("cpu", init_scale=8.0, max_norm=math.inf)
        scaler.scale(parameter.sum()).backward()
        scaler.step(*optimizers)
        scaler.update()
        assert parameter.item() == 8.0
        assert scaler.last_step is not None
        assert scaler.last_step.grad_norm == 1.0

    @pytest.mark.parametrize("fused", [False, True])
    def test_gradient_is_unscaled_by_the_scale_of_its_loss(self, fused: bool) -> None:
        # C16: update() between two optimizers; and C27: a growth step is not halved.
        first, first_optimizer = sgd(0.0, fused=fused)
        second, second_optimizer = sgd(0.0, fused=fused)
        scaler = DistributedGradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for bad in (0.0, math.inf, 0.0):
            first_optimizer.zero_grad()
            second_optimizer.zero_grad()
            scaler.scale((first + second).sum()).backward()
            if bad:
                first.grad.fill_(bad)  # type: ignore[union-attr]
            scaler.step(first_optimizer)
            scaler.update()
            scaler.step(second_optimizer)
            scaler.update()
        assert first.item() == -2.0
        assert second.item() == -3.0

    def test_pending_gradients_follow_the_scale(self) -> None:
        # The second optimizer steps at every other update, so its gradients are summed under two scales.
        first, first_optimizer = sgd(0.0)
        second, second_optimizer = sgd(0.0)
        scaler = DistributedGradScaler("cpu", init_scale=1024.0, growth_interval=1)
        scaler.scale(torch.zeros(()))
        scaler.step(first_optimizer, second_optimizer)
        scaler.update()
        for step in range(1, 7):
            first_optimizer.zero_grad()
            scaler.scale((first + second).sum()).backward()
            if step % 2:
                scaler.step(first_optimizer)
            else:
                scaler.step(first_optimizer, second_optimizer)
                second_optimizer.zero_grad()
            scaler.update()
        assert scaler.get_scale() == 1024.0 * 2**7
        assert (first.item(), second.item()) == (-6.0, -6.0)

    def test_gradients_of_others_are_left_alone(self) -> None:
        # Two scalers, both told the names of the whole model, as for a GAN; and an optimizer without a scaler.
        first, first_optimizer = sgd(0.0)
        second, second_optimizer = sgd(0.0)
        third, third_optimizer = sgd(0.0)
        names = {"first": first, "second": second, "third": third}
        scalers = [DistributedGradScaler("cpu", init_scale=4.0, growth_interval=1, names=names) for _ in range(2)]
        for _ in range(4):
            for optimizer in (first_optimizer, second_optimizer, third_optimizer):
                optimizer.zero_grad()
            third.sum().backward()
            scalers[1].scale(second.sum()).backward()
            scalers[0].scale(first.sum()).backward()
            scalers[0].step(first_optimizer)
            scalers[1].step(second_optimizer)
            third_optimizer.step()
            for scaler in scalers:
                scaler.update()
        assert (first.item(), second.item(), third.item()) == (-4.0, -4.0, -4.0)

    def test_rank_without_a_loss_leaves_the_gradients_of_stepped_optimizers_alone(self) -> None:
        # Nothing waits after a step, so there is nothing to bring to the new scale, and no pass to pay for it.
        parameter, optimizer = sgd(0.0)
        scaler = DistributedGradScaler("cpu", policy="none")
        for value in (4.0, 8.0):
            parameter.grad = torch.tensor([value])
            scaler.step(optimizer)
            version = parameter.grad._version
            scaler.update()
            assert parameter.grad._version == version
        assert parameter.item() == -12.0

    def test_growth_step_of_plain_sgd(self) -> None:
        # C27: -1, -1, -1; a trainer that updates the scale first takes -1, -1, -0.5.
        parameter, optimizer = sgd(0.0)
        scaler = DistributedGradScaler("cpu", growth_interval=2)
        for expected in (-1.0, -2.0, -3.0, -4.0, -5.0):
            train_step(scaler, optimizer, parameter.sum())
            assert parameter.item() == expected
        assert scaler.get_scale() == 2.0**18

    def test_gradient_accumulation(self) -> None:
        parameter, optimizer = sgd(0.0)
        scaler = DistributedGradScaler("cpu")
        for _ in range(3):
            scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == -3.0

    def test_clips_the_unscaled_gradient(self) -> None:
        # C36: clipping the scaled gradient would take a step of 1e-5 or so.
        for fused in (False, True):
            for explicit in (False, True):
                parameter, optimizer = sgd(0.0, 0.0, fused=fused)
                scaler = DistributedGradScaler("cpu", max_norm=1.0)
                scaler.scale((parameter * torch.tensor([30.0, 40.0])).sum()).backward()
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                assert parameter.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
                report = scaler.last_step
                assert report is not None
                assert report.grad_norm == pytest.approx(50.0)
                assert report.clip_coef == pytest.approx(0.02, rel=1e-6)
                assert list(report.amax.values()) == [40.0]

    def test_norm_of_a_huge_scaled_gradient_is_no_overflow(self) -> None:
        # C30
        parameter, optimizer = sgd(*[0.0] * 64)
        scaler = DistributedGradScaler("cpu", init_scale=2.0**100, max_norm=math.inf)
        train_step(scaler, optimizer, parameter.sum())
        assert scaler.last_step is not None
        assert not scaler.last_step.skipped
        assert scaler.last_step.grad_norm == 8.0

    def test_update_that_unscaling_would_make_infinite(self) -> None:
        # C10: torch steps, and the weights are infinite from then on.
        parameter, optimizer = sgd(0.0)
        scaler = DistributedGradScaler("cpu", init_scale=2.0**-20)
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        parameter.grad.fill_(1e36)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 0.0
        assert scaler.last_step is not None
        assert scaler.last_step.culprit == Culprit(0, "SGD0.group0.param0", "inf")

    def test_what_the_user_does_to_unscaled_gradients_is_checked(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        assert parameter.grad is not None
        assert parameter.grad.item() == 1.0
        parameter.grad.div_(0.0)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 1.0
        assert scaler.get_scale() == 2.0**15

    def test_unscale_and_update_without_step(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        parameter.grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.update()
        assert scaler.get_scale() == 2.0**15

    def test_return_values(self) -> None:
        parameter, optimizer = sgd(1.0)
        optimizer.step = lambda: "stepped"  # type: ignore[assignment, misc, return-value]
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        assert scaler.step(optimizer=optimizer) == "stepped"
        scaler.update()
        assert scaler.step() is None  # a rank without an optimizer takes part

    def test_a_step_that_fails_half_way_is_not_taken_again(self) -> None:
        # The gradients are unscaled by then: a second try would divide them twice, and other ranks have stepped.
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", init_scale=1024.0)
        saved = scaler.state_dict()
        scaler.scale(parameter.sum()).backward()
        hook = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            scaler.step(optimizer)
        hook.remove()
        for _ in range(2):
            with pytest.raises(
                ProtocolError, match=r"step 0 failed on this rank .KeyboardInterrupt.* from a checkpoint"
            ):
                scaler.step(optimizer)
        assert parameter.item() == 1.0
        scaler.load_state_dict(saved)
        train_step(scaler, optimizer, parameter.sum())
        assert parameter.item() == 0.0

    def test_one_optimizer_twice(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        with pytest.raises(ProtocolError, match="one optimizer twice"):
            scaler.step(optimizer, optimizer)
        assert parameter.item() == 1.0

    def test_fused_momentum_after_its_state_was_reset(self) -> None:
        parameter, optimizer = sgd(*[1.0] * 64, momentum=0.9, fused=True)
        scaler = DistributedGradScaler("cpu")
        train_step(scaler, optimizer, parameter.sum())
        optimizer.state.clear()
        train_step(scaler, optimizer, parameter.sum(), math.inf)
        assert not optimizer.state

    def test_optimizer_that_compares_and_has_no_hash(self) -> None:
        class Wrapper:
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.param_groups, self.step = inner.param_groups, inner.step

            def __eq__(self, other: object) -> bool:
                return True

        first, first_optimizer = sgd(0.0)
        second, second_optimizer = sgd(0.0)
        wrappers = [Wrapper(first_optimizer), Wrapper(second_optimizer)]
        scaler = DistributedGradScaler("cpu", init_scale=8.0)
        scaler.scale((first + second).sum()).backward()
        scaler.unscale_(wrappers[0])  # type: ignore[arg-type]
        scaler.step(*wrappers)  # type: ignore[arg-type]
        scaler.update()
        assert (first.item(), second.item()) == (-1.0, -1.0)


class TestKindsOfGradient:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("fused", [False, True])
    def test_parameters_of_other_dtypes(self, dtype: torch.dtype, fused: bool) -> None:
        # C24: torch refuses fp16 gradients.
        parameter, optimizer = sgd(1.0, 2.0, dtype=dtype, fused=fused)
        scaler = DistributedGradScaler("cpu", init_scale=256.0)
        train_step(scaler, optimizer, (parameter * 0.5).sum())
        assert parameter.tolist() == [0.5, 1.5]
        train_step(scaler, optimizer, (parameter * 0.5).sum(), math.nan)
        assert parameter.tolist() == [0.5, 1.5]

    def test_expanded_gradient(self) -> None:
        parameter, optimizer = sgd(1.0, 2.0, 3.0)
        scaler = DistributedGradScaler("cpu", init_scale=4.0)
        scaler.scale(parameter.sum()).backward()
        parameter.grad = torch.full((1,), 4.0).expand(3)
        scaler.step(optimizer)
        assert parameter.tolist() == [0.0, 1.0, 2.0]

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_fp8_values_are_unscaled(self, dtype: torch.dtype) -> None:
        values = torch.tensor([64.0, -3.0]).to(dtype)
        scale_([values], torch.tensor(0.25))
        assert values.float().tolist() == [16.0, -0.75]

    def test_sparse_gradient_whose_sum_overflows(self) -> None:
        # C22: each value is finite, the sum of the duplicates is not.
        embedding = nn.Embedding(4, 2, sparse=True, dtype=torch.float16)
        before = embedding.weight.detach().clone()
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        scaler = DistributedGradScaler("cpu", init_scale=2.0**15, names=embedding)
        for indices, is_bad in (([1, 1, 1], True), ([1, 3], False)):
            optimizer.zero_grad()
            scaler.scale(embedding(torch.tensor(indices)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.last_step is not None
            assert scaler.last_step.skipped is is_bad
            assert torch.equal(embedding.weight, before) is is_bad
            assert scaler.last_step.culprit == (Culprit(0, "weight", "inf") if is_bad else None)
        assert torch.equal(embedding.weight[[1, 3]], before[[1, 3]] - 1)

    def test_complex(self) -> None:
        # C21
        parameter = nn.Parameter(torch.tensor([1 + 2j, 3.0]))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = DistributedGradScaler("cpu", max_norm=math.inf)
        for bad in (0.0, complex(0, math.nan)):
            optimizer.zero_grad()
            scaler.scale((parameter * (3 - 4j)).real.sum()).backward()
            if bad:
                parameter.grad[0] = bad  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            assert parameter.tolist() == [-2 - 2j, -4j]
        assert scaler.last_step is not None
        assert scaler.last_step.skipped

    def test_without_gradients_the_ranks_still_decide(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", growth_interval=1)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**17
        assert parameter.item() == 1.0


class TestWhatTheCallerSees:
    def test_first_step_overflows_and_the_schedule_waits(self) -> None:
        # C14: warnings are errors here, that of torch's schedulers included.
        parameter, optimizer = sgd(1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        scaler = DistributedGradScaler("cpu")
        rates = []
        for bad in (math.inf, 0.0, 0.0):
            train_step(scaler, optimizer, parameter.sum(), bad)
            assert scaler.last_step is not None
            if not scaler.last_step.skipped:
                schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == [1.0, 0.5, 0.25]

    @pytest.mark.parametrize("fused", [False, True])
    def test_reports_reach_the_callback_in_order(self, fused: bool) -> None:
        reports: list[StepReport] = []
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = DistributedGradScaler("cpu", names=model, on_step=reports.append)
        for bad in (0.0, math.nan, 0.0):
            train_step(scaler, optimizer, model(torch.ones(1, 2)).sum(), bad)
        assert [report.step for report in reports] == [0, 1, 2]
        assert [report.culprit for report in reports] == [None, Culprit(0, "weight", "nan"), None]
        assert [(report.scale, report.next_scale) for report in reports] == [
            (65536.0, 65536.0),
            (65536.0, 32768.0),
            (32768.0, 32768.0),
        ]
        assert reports[0].amax == {"weight": 1.0, "bias": 1.0}
        assert reports[0].grad_norm is None
        assert scaler.last_step == reports[-1]

    def test_last_step_before_update(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        assert scaler.last_step is None
        scaler.scale(parameter.sum() * 1).backward()
        parameter.grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        assert scaler.last_step is not None
        assert (scaler.last_step.skipped, scaler.last_step.next_scale) == (True, 32768.0)
        scaler.update(5.0)
        assert scaler.last_step.next_scale == scaler.get_scale() == 5.0

    def test_names_from_the_optimizer(self) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        scaler = DistributedGradScaler("cpu")
        train_step(scaler, optimizer, model(torch.ones(1, 2)).sum(), math.inf)
        assert scaler.last_step is not None
        assert scaler.last_step.culprit == Culprit(0, "weight", "inf")

    def test_veto_and_stop(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", growth_interval=2)
        train_step(scaler, optimizer, parameter.sum())
        scaler.veto("a bad batch")
        scaler.request_stop()
        train_step(scaler, optimizer, parameter.sum())
        report = scaler.last_step
        assert report is not None
        assert (report.skipped, report.vetoed_by, report.culprit, report.stop_requested) == (True, 0, None, True)
        assert scaler.get_scale() == 2.0**16
        train_step(scaler, optimizer, parameter.sum())
        assert scaler.get_scale() == 2.0**17  # the veto neither counts as clean nor breaks the run of clean steps
        assert parameter.item() == -1.0

    def test_veto_between_step_and_update_is_for_the_coming_step(self, caplog: pytest.LogCaptureFixture) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.veto("too late for this one")
        scaler.update()
        assert "too late for this one" in caplog.text
        skipped = []
        for _ in range(2):
            train_step(scaler, optimizer, parameter.sum())
            assert scaler.last_step is not None
            skipped.append(scaler.last_step.skipped)
        assert skipped == [True, False]

    def test_reports_of_a_device_come_one_update_later_on_every_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # What decides is how often update() was called, never how fast a copy arrives.
        monkeypatch.setattr(HostCopy, "is_instant", property(lambda self: False))
        reports: list[StepReport] = []
        parameter, optimizer = sgd(1.0, fused=True)
        scaler = DistributedGradScaler("cpu", on_step=reports.append)
        train_step(scaler, optimizer, parameter.sum())  # the first step of an optimizer is read at once
        train_step(scaler, optimizer, parameter.sum())
        for step in range(4):
            train_step(scaler, optimizer, parameter.sum())
            assert [report.step for report in reports] == list(range(step + 2))


class TestPolicies:
    def test_hysteresis(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", hysteresis=2, growth_interval=3)
        scales = []
        for bad in (math.inf, 0.0, math.inf, math.inf, 0.0, 0.0, 0.0, math.inf, math.inf):
            train_step(scaler, optimizer, parameter.sum(), bad)
            scales.append(math.log2(scaler.get_scale()))
        assert scales == [16, 16, 15, 14, 14, 14, 15, 15, 14]

    def test_hysteresis_that_clean_steps_refill_and_growth_that_comes_later_at_first(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", hysteresis=2, hysteresis_refill=2, growth_interval=3, growth_delay=1)
        scales = []
        for bad in (math.inf, math.inf, 0.0, 0.0, math.inf, *[0.0] * 7):
            train_step(scaler, optimizer, parameter.sum(), bad)
            scales.append(math.log2(scaler.get_scale()))
        assert scales == [16, 15, 15, 15, 15, 15, 15, 15, 16, 16, 16, 17]

    def test_floor_cap_and_the_error_at_the_floor(self) -> None:
        # C10, C11
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler(
            "cpu", 4.0, growth_interval=1, min_scale=1.0, max_scale=6.0, max_consecutive_skips=3
        )
        train_step(scaler, optimizer, parameter.sum())
        train_step(scaler, optimizer, parameter.sum())
        assert scaler.get_scale() == 6.0
        for scale in (3.0, 1.5, 1.0, 1.0, 1.0):
            train_step(scaler, optimizer, parameter.sum(), math.nan)
            assert scaler.get_scale() == scale
        with pytest.raises(ScaleExhaustedError, match=r"3 steps .* since step 5.* SGD0.group0.param0 is nan on rank 0"):
            train_step(scaler, optimizer, parameter.sum(), math.nan)

    def test_count_at_the_floor_starts_anew_after_a_clean_step(self) -> None:
        # C32
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", 1.0, min_scale=1.0, max_consecutive_skips=2)
        for _ in range(5):
            train_step(scaler, optimizer, parameter.sum(), math.inf)
            train_step(scaler, optimizer, parameter.sum())

    @pytest.mark.parametrize("policy", ["dynamic", "static", "none"])
    def test_loss_that_stays_nan_ends_the_run(self, policy: str) -> None:
        # C12
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", policy=policy, max_consecutive_skips=4)
        train_step(scaler, optimizer, parameter.sum())
        scale = scaler.get_scale()
        for _ in range(3):
            train_step(scaler, optimizer, parameter.sum() * math.nan)
        with pytest.raises(ScaleExhaustedError, match=r"loss itself is not finite: 4 steps .* since step 1; .* rank 0"):
            train_step(scaler, optimizer, parameter.sum() * math.nan)
        assert scaler.get_scale() == scale

    def test_static_and_none_keep_the_check(self) -> None:
        for policy, scale in (("static", 128.0), ("none", 1.0)):
            parameter, optimizer = sgd(1.0)
            scaler = DistributedGradScaler("cpu", 128.0, policy=policy)
            for bad in (0.0, math.inf, math.nan):
                train_step(scaler, optimizer, parameter.sum(), bad)
                assert scaler.get_scale() == scale
            assert parameter.item() == 0.0

    def test_policy_none_needs_no_scale_call(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", policy="none")
        parameter.sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 0.0

    def test_disabled(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", enabled=False)
        loss = parameter.sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.item() == 0.0
        assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
        assert scaler.last_step == StepReport(0, False, 1.0, 1.0, None, None, None, {})  # so that the same loop works
        scaler.load_state_dict({})


class TestMisuse:
    def test_unscale_twice(self) -> None:
        # C17
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(
            RuntimeError, match=r"unscale_\(\) was called twice for SGD .* pass max_norm= to the scaler"
        ):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert parameter.item() == 0.0
        with pytest.raises(RuntimeError, match=r"after its step\(\)"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called since the last update"):
            scaler.step(optimizer)

    def test_update_without_step(self) -> None:
        with pytest.raises(ProtocolError, match=r"without a step\(\)"):
            DistributedGradScaler("cpu").update()

    def test_step_without_scale(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        parameter.sum().backward()
        with pytest.raises(ProtocolError, match=r"Use scaler.scale\(loss\).backward\(\)"):
            scaler.step(optimizer)
        assert parameter.item() == 1.0

    def test_closures_are_refused_however_they_come(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        with pytest.raises(RuntimeError, match="got a closure"):
            scaler.step(optimizer, closure=lambda: 1.0)
        with pytest.raises(RuntimeError, match="got a closure"):
            scaler.step(optimizer, lambda: 1.0)
        with pytest.raises(RuntimeError, match="got a int"):
            scaler.step(optimizer, 3)
        with pytest.raises(RuntimeError, match="got a Linear"):
            scaler.step(nn.Linear(1, 1))
        assert parameter.item() == 1.0

    def test_update_to_a_tensor_that_is_not_a_number(self) -> None:
        scaler = DistributedGradScaler("cpu", 8.0)
        scaler.update(torch.tensor(math.nan))
        assert scaler.get_scale() == 8.0

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, torch.ones(2), "8", True])
    def test_update_to_an_impossible_scale(self, scale: float | torch.Tensor) -> None:
        with pytest.raises(ConfigError):
            DistributedGradScaler("cpu").update(scale)

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            ("WORLD_SIZE=4", {"WORLD_SIZE": "4"}),
            ("openmpi started 4 ranks", {f"OMPI_COMM_WORLD_{key}": value for key, value in _OPEN_MPI.items()}),
        ],
    )
    def test_several_ranks_without_a_process_group(
        self, said: str, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in words.items():
            monkeypatch.setenv(name, value)
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        with pytest.raises(ConfigError, match=f"{said}, but torch.distributed is not initialized"):
            scaler.step(optimizer)
        alone = DistributedGradScaler("cpu", reducer=LocalReducer())
        alone.scale(parameter.sum())
        alone.step(optimizer)


class TestState:
    @pytest.mark.parametrize(
        "change",
        [
            {"version": 0},
            {"version": 2},
            {"scale": 10**30 * 10**30},
            {"step": 2**31 - 1},
            {"blocked_steps": 2**31 - 1},
            {"hysteresis_tracker": 5},
            {"policy": "static"},
            {"version": True},
            {"version": 2, "new": 1},
            {"new": 1},
        ],
        ids=str,
    )
    def test_a_state_that_cannot_be_used_changes_nothing(self, change: dict[str, Any]) -> None:
        scaler = DistributedGradScaler("cpu", 4.0)
        before = scaler.state_dict()
        with pytest.raises(ConfigError, match="saved scaler state"):
            scaler.load_state_dict({**before, **change})
        with pytest.raises(ConfigError, match="but a int"):
            scaler.load_state_dict(5)  # type: ignore[arg-type]
        assert scaler.state_dict() == before

    @pytest.mark.parametrize("key", DistributedGradScaler("cpu").state_dict())
    def test_c29_no_key_may_be_missing_or_misspelt(self, key: str) -> None:
        scaler = DistributedGradScaler("cpu", hysteresis=3)
        before = scaler.state_dict()
        incomplete = {other: value for other, value in before.items() if other != key}
        for saved in (incomplete, incomplete | {key.upper(): before[key]}):
            with pytest.raises(ConfigError, match=f"'{key}'"):
                scaler.load_state_dict(saved)
        assert scaler.state_dict() == before

    def test_a_state_that_cannot_be_used_is_named_once(self) -> None:
        scaler = DistributedGradScaler("cpu")
        for scale in (0.0, math.nan):
            with pytest.raises(ConfigError) as error:
                scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
            text = str(error.value)
            assert text.count("cannot be used") == 1
            assert "init_scale" not in text
            assert re.search(r"\bscale(=| is)", text)

    def test_loads_in_place(self) -> None:
        # What was captured, in a CUDA graph for instance, goes on reading the same tensors.
        scaler = DistributedGradScaler("cpu")
        scaler.scale(torch.ones(()))
        tensors = scaler._state()
        scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0, "_growth_tracker": 3, "blocked_steps": 2})
        assert all(mine is old for mine, old in zip(scaler._state(), tensors, strict=True))
        assert [float(value) for value in tensors] == [8.0, 3, 1, 2]

    def test_every_rule_that_can_be_built_can_be_saved(self) -> None:
        # A growth_interval of 2^31 - 1 is a way to say never.
        rule = {"growth_interval": 2**31 - 1, "hysteresis": 2**31 - 1}
        scaler = DistributedGradScaler("cpu", **rule)  # type: ignore[arg-type]
        saved = scaler.state_dict()
        scaler.load_state_dict(saved)
        assert scaler.state_dict() == saved

    def test_after_a_load_there_is_no_last_step(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu")
        saved = scaler.state_dict()
        train_step(scaler, optimizer, parameter.sum())
        scaler.load_state_dict(saved)
        assert scaler.last_step is None

    def test_pickle_and_deepcopy_go_on_where_it_was(self) -> None:
        parameter, optimizer = sgd(1.0)
        scaler = DistributedGradScaler("cpu", hysteresis=2, growth_interval=5)
        for bad in (0.0, math.inf, 0.0):
            train_step(scaler, optimizer, parameter.sum(), bad)
        for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
            assert twin.state_dict() == scaler.state_dict()
            train_step(twin, optimizer, parameter.sum(), math.inf)
            assert twin.get_scale() == 2.0**15

    def test_after_a_load_fused_optimizers_are_asked_about(self) -> None:
        # Their state is likely to be restored too, and what is not there would be created by a kernel that skips.
        parameter, optimizer = sgd(1.0, momentum=0.9, fused=True)
        scaler = DistributedGradScaler("cpu")
        train_step(scaler, optimizer, parameter.sum())
        assert scaler._steps_on_device(optimizer)
        optimizer.state[parameter]["momentum_buffer"] = None
        scaler.load_state_dict(scaler.state_dict())
        assert not scaler._steps_on_device(optimizer)
        train_step(scaler, optimizer, parameter.sum(), math.inf)
        assert optimizer.state[parameter]["momentum_buffer"] is None

    def test_a_copy_made_after_a_loss_scales_losses_of_its_own(self) -> None:
        scaler = DistributedGradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
            parameter, optimizer = sgd(1.0)
            twin.scale(3 * parameter).sum().backward()
            twin.step(optimizer)
            assert parameter.item() == -2.0

    def test_restart_is_exact(self) -> None:
        parameter, optimizer = sgd(1.0)
        rule = {"hysteresis": 2, "growth_interval": 3, "max_scale": 2.0**20}
        straight = DistributedGradScaler("cpu", **rule)  # type: ignore[arg-type]
        restarted = DistributedGradScaler("cpu", **rule)  # type: ignore[arg-type]
        for step in range(24):
            bad = math.inf if step in (1, 2, 8, 15, 16, 17) else 0.0
            train_step(straight, optimizer, parameter.sum(), bad)
            file = io.BytesIO()
            torch.save(restarted.state_dict(), file)
            file.seek(0)
            restarted = DistributedGradScaler("cpu", **rule)  # type: ignore[arg-type]
            restarted.load_state_dict(torch.load(file, weights_only=True))
            train_step(restarted, optimizer, parameter.sum(), bad)
            assert restarted.state_dict() == straight.state_dict()
            assert restarted.last_step == straight.last_step

    def test_the_loaded_rule_wins_and_says_so(self) -> None:
        saved = DistributedGradScaler("cpu", growth_interval=7).state_dict()
        scaler = DistributedGradScaler("cpu")
        with pytest.warns(UserWarning, match="growth_interval from 2000 to 7"):
            scaler.load_state_dict(saved)
        assert scaler.get_growth_interval() == 7
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.load_state_dict(saved)


class CountHostReads(TorchDispatchMode):
    """Counts the operators through which the host reads a tensor's value."""

    count = 0
    _names = ("_local_scalar_dense", "item", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self._names
        return func(*args, **(kwargs or {}))


def test_the_import_does_not_import_dtensor() -> None:
    # It takes a third as long as torch itself, and there are no DTensors without it. (torch.optim imports it, too.)
    script = "import sys, distscale; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
