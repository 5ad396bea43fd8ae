"""Gradients of DDP and FSDP1 in FP8, through their communication hooks; error feedback."""

from __future__ import annotations

import copy
import io
import math
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from wire_models import Blocks, agree, batch, errors, exact, new_scales, step

from distscale import ConfigError
from distscale.fp8 import DelayedScaling, Fp8Scales, SentGradients, send_gradients_in_fp8
from ranks import run_ranks

INF_BITS = 0x7F800000


def losses(rank: int, count: int = 1, **kwargs: Any) -> Callable[[nn.Module], list[Tensor]]:
    return lambda model: [model(batch(rank, index), **kwargs) for index in range(count)]


def equal_everywhere(model: nn.Module) -> bool:
    mine = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
    first = mine.clone()
    dist.broadcast(first, 0)
    are_equal = torch.tensor(torch.equal(mine, first))
    dist.all_reduce(are_equal, dist.ReduceOp.MIN)
    return bool(are_equal)


def names_seen(sent: Any) -> list[tuple[str, ...]]:
    """Fills itself with the parameters of each reduction."""
    seen: list[tuple[str, ...]] = []
    (sender,) = sent.senders
    reduce = sender.reduce

    def watched(rows: Tensor, pieces: Sequence[Any], *args: Any) -> Tensor:
        seen.append(tuple(piece.name for piece in pieces))
        return reduce(rows, pieces, *args)  # type: ignore[no-any-return]

    sender.reduce = watched
    return seen


# ---------------------------------------------------------------- DDP


def ddp(rank: int) -> None:
    world_size = dist.get_world_size()
    ways = [(False, "tensor"), (True, "block"), (True, "tensor"), (False, "block")]
    for in_fp8, granularity in ways if world_size == 2 else ways[:2]:
        model = Blocks()
        expected = exact(model, losses(rank), 1 / world_size)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
        scales = new_scales()
        sent = send_gradients_in_fp8(
            wrapped,
            scales,
            min_numel=0,
            gather_in_fp8=in_fp8,
            granularity=granularity,  # type: ignore[arg-type]
        )
        agree(scales)
        seen = names_seen(sent)
        for _ in range(3):
            wrapped.zero_grad()
            wrapped(batch(rank)).backward()
            assert equal_everywhere(wrapped)
            for name, error in errors(model, expected).items():
                is_exempt = "norm" in name or "bias" in name or "embedding" in name
                bound = 0.006 if is_exempt else 0.045 if in_fp8 else 0.03
                assert error < bound and (is_exempt or error > 0.002), (name, error)
            bits, num_saturated = step(scales)
            assert (bits > 0).all() and not num_saturated.any()
        bytes_per_value = sent.traffic.num_bytes / sent.traffic.num_values
        assert bytes_per_value < (1.3 if in_fp8 else 1.7)
        # The buckets of the first iteration are not those of the second and third.
        num_first = len(seen) - 2 * next(
            count for count in range(1, len(seen)) if seen[-count:] == seen[-2 * count : -count]
        )
        assert len(seen[num_first:]) > 2 and set(seen[:num_first]) != set(seen[num_first:])


def ddp_accumulates(rank: int) -> None:
    world_size = dist.get_world_size()
    model = Blocks()
    expected = exact(model, losses(rank, 2, uses_side=False), 1 / world_size)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    scales = new_scales()
    send_gradients_in_fp8(wrapped, scales, min_numel=0)
    agree(scales)
    for _ in range(2):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(batch(rank, 0), uses_side=False).backward()
        wrapped(batch(rank, 1), uses_side=False).backward()
        assert max(errors(model, expected, unused=["side"]).values()) < 0.03
        bits, _ = step(scales)
        seen = {tensor.name: amax > 0 for tensor, amax in zip(scales.tensors, bits.tolist(), strict=True)}
        assert seen == {name: "side" not in name for name in seen}


def ddp_low_precision(rank: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(rank)
        x = torch.randn(8, 64, dtype=dtype)
        torch.manual_seed(0)
        model = nn.Linear(64, 64).to(dtype)
        loss = partial(lambda x, model: [model(x).square().sum()], x.float())
        expected = exact(copy.deepcopy(model).float(), loss, 1 / dist.get_world_size())
        wrapped = DistributedDataParallel(model)
        send_gradients_in_fp8(wrapped, new_scales())
        wrapped(x).square().sum().backward()
        assert errors(model, expected)["weight"] < 0.03
        grad = model.weight.grad
        assert grad is not None and grad.dtype == dtype
        # What is gathered in fp16 has more digits than bf16 holds.
        assert torch.equal(grad.bfloat16().to(dtype), grad) == (dtype == torch.bfloat16)


def ddp_not_finite(rank: int) -> None:
    for in_fp8 in (False, True):
        for value in (math.inf, math.nan):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            wrapped = DistributedDataParallel(model)
            scales = new_scales()
            send_gradients_in_fp8(wrapped, scales, gather_in_fp8=in_fp8)
            agree(scales)
            if rank == 1:
                poison = torch.zeros(64, 64)
                poison[40, 3] = value
                model[1].weight.register_hook(poison.add)
            wrapped(torch.ones(2, 64)).sum().backward()
            bits, _ = scales.collect(torch.device("cpu"))
            assert (bits >= INF_BITS).tolist() == [False, rank == 1]
            grad = model[1].weight.grad
            assert grad is not None and not grad[40, 3].isfinite() and grad.isfinite().sum() == grad.numel() - 1


def ddp_mistakes(rank: int) -> None:
    wrapped = DistributedDataParallel(nn.Linear(64, 64))
    send_gradients_in_fp8(wrapped, new_scales())
    with pytest.raises(ConfigError, match="has a communication hook already"):
        send_gradients_in_fp8(wrapped, new_scales())
    with pytest.raises(ConfigError, match="neither a DDP nor an FSDP1 model"):
        send_gradients_in_fp8(nn.Linear(64, 64), new_scales())
    with pytest.raises(ConfigError, match="granularity='row'"):
        send_gradients_in_fp8(wrapped, new_scales(), granularity="row")  # type: ignore[arg-type]
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(64, 64, sparse=True), nn.Linear(64, 64)))
    with pytest.raises(ConfigError, match="the embedding 0 has sparse gradients"):
        send_gradients_in_fp8(sparse, new_scales())


# ---------------------------------------------------------------- FSDP1


def fsdp1(rank: int) -> None:
    world_size = dist.get_world_size()
    policy = ModuleWrapPolicy({type(Blocks().blocks[0])})
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if world_size == 2 else (torch.float32,):
            for num_batches in (1, 2):
                model = Blocks()
                expected = exact(model, losses(rank, num_batches), 1 / world_size)
                precision = MixedPrecision(reduce_dtype=dtype)
                wrapped = FSDP(
                    model,
                    sharding_strategy=strategy,
                    auto_wrap_policy=policy,
                    use_orig_params=True,
                    mixed_precision=precision,
                    device_id=torch.device("cpu"),
                )
                scales = new_scales()
                sent = send_gradients_in_fp8(wrapped, scales)
                agree(scales)
                for index in range(num_batches):
                    if index + 1 < num_batches:
                        with wrapped.no_sync():
                            wrapped(batch(rank, index)).backward()
                    else:
                        wrapped(batch(rank, index)).backward()
                with FSDP.summon_full_params(wrapped, with_grads=True):
                    found = {
                        name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in wrapped.named_parameters()
                    }
                lost = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
                whole = torch.cat([grad.flatten() for grad in expected.values()])
                assert 0.005 < lost.norm() / whole.norm() < 0.03
                for name, grad in expected.items():
                    assert (found[name] - grad).norm() / grad.norm() < (0.03 if grad.ndim == 2 else 0.08), name
                assert 1.0 <= sent.traffic.num_bytes / sent.traffic.num_values < 1.04
                bits, num_saturated = step(scales)
                assert (bits > 0).all() and not num_saturated.any()


def fsdp1_not_finite(rank: int) -> None:
    for value in (math.inf, math.nan):
        wrapped = FSDP(nn.Linear(64, 64, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
        scales = new_scales()
        send_gradients_in_fp8(wrapped, scales)
        agree(scales)
        x = torch.ones(1, 64)
        x[0, 3] = value if rank == 1 else 1.0
        wrapped(x).sum().backward()
        bits, _ = scales.collect(torch.device("cpu"))
        assert (bits >= INF_BITS).tolist() == [rank == 1]
        with FSDP.summon_full_params(wrapped, with_grads=True):
            (grad,) = (param.grad for param in wrapped.parameters())
        assert grad is not None and not grad[:, 3].isfinite().any()


def fsdp1_mistakes(rank: int) -> None:
    wrapped = FSDP(nn.Linear(64, 64), device_id=torch.device("cpu"))
    for kwargs in ({"granularity": "tensor"}, {"exempt": lambda *_: False}, {"error_feedback": True}):
        with pytest.raises(ConfigError, match="FSDP1 does not tell"):
            send_gradients_in_fp8(wrapped, new_scales(), **kwargs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gather_in_fp8 is for DDP"):
        send_gradients_in_fp8(wrapped, new_scales(), gather_in_fp8=True)
    send_gradients_in_fp8(wrapped, new_scales())
    with pytest.raises(ConfigError, match="has a communication hook already"):
        send_gradients_in_fp8(wrapped, new_scales())
    whole = FSDP(nn.Linear(64, 64), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(ConfigError, match="NO_SHARD"):
        send_gradients_in_fp8(whole, new_scales())
    other = dist.new_group(range(dist.get_world_size()))
    inner = FSDP(nn.Linear(64, 64), device_id=torch.device("cpu"), process_group=other)
    nested = FSDP(nn.Sequential(inner, nn.Linear(64, 64)), device_id=torch.device("cpu"))
    with pytest.raises(ConfigError, match="has another process group than the model"):
        send_gradients_in_fp8(nested, new_scales())


def alone(rank: int) -> None:
    """At world size 1 nothing is sent, so nothing is cast, nor refused."""
    group = [dist.new_group([peer]) for peer in range(dist.get_world_size())][rank]

    def in_fsdp1(model: nn.Module) -> nn.Module:
        with pytest.warns(UserWarning, match="NO_SHARD"):
            return FSDP(model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True)

    for wrap in (partial(DistributedDataParallel, process_group=group), in_fsdp1):
        model = nn.Linear(64, 64)
        exact = copy.deepcopy(model)
        exact(torch.ones(1, 64)).square().sum().backward()
        wrapped = wrap(model)
        sent = send_gradients_in_fp8(wrapped, new_scales())
        wrapped(torch.ones(1, 64)).square().sum().backward()
        for param, expected in zip(wrapped.parameters(), exact.parameters(), strict=True):
            assert param.grad is not None and expected.grad is not None
            assert torch.equal(param.grad, expected.grad)
        assert sent.traffic.num_bytes == 0


# ---------------------------------------------------------------- error feedback


class Given(nn.Module):
    """A parameter whose gradient is what the call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def constant(rank: int) -> Tensor:
    """Most of it is rounded away in one direction by a scale that fits the largest value."""
    grad = torch.full((64, 64), 1.02 + 0.001 * rank)
    grad[0, 0] = 448.0
    return grad


def feedback(rank: int) -> None:
    """The mean over steps of what is applied comes close to the gradient, also where the loss scale changes."""
    world_size = dist.get_world_size()
    expected = sum(constant(peer) for peer in range(world_size)) / world_size
    for wrap in (fully_shard, DistributedDataParallel):
        biases = {}
        for error_feedback in (False, True):
            model = wrap(Given())  # type: ignore[operator]
            scales = new_scales()
            sent = send_gradients_in_fp8(model, scales, error_feedback=error_feedback)
            agree(scales)
            total, loss_scale, num_steps = torch.zeros(64, 64), 1.0, 16
            for index in range(num_steps):
                model.zero_grad()
                (model(constant(rank)) * loss_scale).backward()
                (param,) = model.parameters()
                grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
                total += grad / loss_scale
                next_scale = 2.0 ** (index % 3 * 4)
                bits, _ = scales.collect(torch.device("cpu"))
                scales.clear()
                dist.all_reduce(bits, dist.ReduceOp.MAX)
                scales.finish_step(bits, torch.zeros(()), torch.tensor(loss_scale), torch.tensor(next_scale))
                loss_scale = next_scale
                if index == 8 and error_feedback:
                    goes_on(sent, wrap)
            biases[error_feedback] = ((total / num_steps - expected)[1:].abs().mean() / expected[1:].mean()).item()
        # DDP gathers in bf16, without feedback, whose half step is 0.4 %.
        assert biases[True] < 0.15 * biases[False] and biases[False] > 0.015, (wrap, biases)


def goes_on(sent: SentGradients, wrap: Any) -> None:
    """A state that is loaded, into a new run by DCP, is the one that was saved, and no other can be."""
    model = wrap(Given())
    again = send_gradients_in_fp8(model, new_scales(), error_feedback=True)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        dcp.save({"sent": sent}, checkpoint_id=folders[0])
        dcp.load({"sent": again}, checkpoint_id=folders[0])
    state = sent.state_dict()
    assert state["num_calls"] == again.state_dict()["num_calls"] != [0]
    residuals, found = ([sender.feedback.state_dict() for sender in each.senders] for each in (sent, again))
    for expected, loaded in zip(residuals, found, strict=True):
        assert loaded.keys() == expected.keys() == {"weight"}
        assert expected["weight"].any() and torch.equal(loaded["weight"], expected["weight"])

    entry = f"residuals_of_rank{dist.get_rank()}"
    fresh = send_gradients_in_fp8(wrap(Given()), new_scales(), error_feedback=True).state_dict()
    others = [state.copy(), {**state, entry: fresh[entry]}, {**state, entry: of_another_number_of_ranks(state[entry])}]
    del others[0][entry]
    for other in others:
        with pytest.warns(UserWarning, match="error feedback begins without residuals"):
            again.load_state_dict(other)
        assert [sender.num_calls for sender in again.senders] == state["num_calls"]
        assert not any(sender.feedback.state_dict() for sender in again.senders)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=re.escape("this is not the state of gradients sent from 1 units")):
        again.load_state_dict({**state, "num_calls": [1, 2]})
    again.senders[0].feedback.load_state_dict({"weight": torch.ones(1, 64 * 64)})  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="the residuals of weight are of gradients that were sharded otherwise"):
        model(torch.ones(64, 64)).backward()
    shutil.rmtree(folders[0], ignore_errors=True)


def of_another_number_of_ranks(entry: bytes) -> bytes:
    value = torch.load(io.BytesIO(entry))
    buffer = io.BytesIO()
    torch.save({**value, "world_size": dist.get_world_size() + 1}, buffer)
    return buffer.getvalue()


class TwoGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Given(), Given()

    def forward(self, grad: Tensor, uses_second: bool) -> Tensor:
        return self.first(grad) + self.second(grad) if uses_second else self.first(grad)  # type: ignore[no-any-return]


def feedback_after_a_skip(rank: int) -> None:
    """A skipped step leaves the residuals as they were before it, under the loss scale that follows."""
    model = fully_shard(TwoGiven())
    scales = new_scales()
    (sender,) = send_gradients_in_fp8(model, scales, error_feedback=True).senders
    agree(scales)
    grad = constant(rank)
    residuals = []
    for num_batches, uses_second, is_bad in ((1, True, False), (2, False, True), (2, True, False)):
        model.zero_grad()
        for index in range(num_batches):
            grad[5, 5] = math.inf if is_bad and rank == 0 else 1.0 + index
            model(grad, uses_second).backward()
        bits, _ = scales.collect(torch.device("cpu"))
        scales.finish_step(bits, torch.tensor(float(is_bad)), torch.ones(()), torch.tensor(0.5 if is_bad else 2.0))
        scales.clear()
        state = sender.feedback.state_dict()  # type: ignore[union-attr]
        assert state.keys() == {"first.weight", "second.weight"}
        residuals.append(state)
    for name in residuals[0]:
        assert residuals[0][name].isfinite().all() and residuals[0][name].any()
        assert torch.equal(residuals[1][name], residuals[0][name] * 0.5)
        assert not torch.equal(residuals[2][name], residuals[1][name])


def feedback_of_micro_batches(rank: int) -> None:
    """What was reduced, and what is left on all ranks, are what there was, over several steps of several reductions."""
    model = fully_shard(Given())
    scales = new_scales()
    (sender,) = send_gradients_in_fp8(model, scales, error_feedback=True).senders
    agree(scales)
    expected, found = torch.zeros(64, 64), torch.zeros(64, 64)
    for _ in range(2):
        model.zero_grad()
        for index in range(3):
            grad = constant(rank) * (1 + index / 16)
            expected += grad
            model(grad).backward()
        (param,) = model.parameters()
        found += param.grad.full_tensor() * dist.get_world_size()  # type: ignore[union-attr]
        bits, _ = scales.collect(torch.device("cpu"))
        scales.clear()
        dist.all_reduce(bits, dist.ReduceOp.MAX)
        scales.finish_step(bits, *[torch.tensor(value) for value in (0.0, 1.0, 1.0)])
    left = sender.feedback.state_dict()["weight"].view(64, 64)  # type: ignore[union-attr]
    dist.all_reduce(left)
    dist.all_reduce(expected)
    assert (left.abs() > 0.01).float().mean() > 0.9
    torch.testing.assert_close(found + left, expected)


def stochastic(rank: int) -> None:
    """Ranks and steps round differently, so their mean is right."""
    model = fully_shard(Given())
    scales = Fp8Scales(DelayedScaling("E4M3"))
    send_gradients_in_fp8(model, scales, stochastic_rounding=True, seed=3)
    grad = torch.full((64, 64), 1.02)
    grad[0, 0] = 448.0
    means = []
    for _ in range(8):
        model.zero_grad()
        model(grad).backward()
        (param,) = model.parameters()
        reduced = param.grad.full_tensor()  # type: ignore[union-attr]
        means.append(reduced[1:].mean())
        # Of two ranks that rounded alike it would be 1.0 or 1.125 alone.
        assert len(reduced[1:].unique()) == dist.get_world_size() + 1
    assert len(set(map(float, means))) == len(means)
    spread = 0.125 * (0.16 * 0.84) ** 0.5 / (8 * 63 * 64 * dist.get_world_size()) ** 0.5
    assert abs(torch.stack(means).mean() - 1.02) < 6 * spread


def cases(rank: int, functions: Sequence[Callable[[int], None]]) -> None:
    for function in functions:
        function(rank)


def test_ddp() -> None:
    run_ranks(cases, 2, [ddp, ddp_accumulates, ddp_low_precision, ddp_not_finite, ddp_mistakes], timeout_s=110.0)


def test_fsdp1() -> None:
    run_ranks(cases, 2, [fsdp1, fsdp1_not_finite, fsdp1_mistakes, alone], timeout_s=110.0)


def test_what_rounding_takes_away() -> None:
    run_ranks(cases, 2, [feedback, feedback_after_a_skip, feedback_of_micro_batches, stochastic], timeout_s=110.0)


def test_on_four_ranks() -> None:
    run_ranks(cases, 4, [ddp, fsdp1, stochastic], timeout_s=110.0)
