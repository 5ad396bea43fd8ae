"""FSDP2 gathers the weights of FP8 linears in FP8: the same products, fewer bytes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from gather_models import WIDTH, Bytes, Model, check_same, sharded, train
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from wire_models import agree, step

from distscale import DistributedGradScaler
from distscale.errors import ConfigError
from distscale.fp8 import CurrentScaling, DelayedScaling, Fp8Linear, Recipe, convert_to_fp8, gather_weights_in_fp8
from distscale.fp8.scales import scale_of_amax
from ranks import run_ranks


def check_same_training(rank: int) -> None:
    """A weight cast twice by one scale is the weight cast once, from the first step on; and is seen as it was."""
    for dtype, power_of_two in ((torch.bfloat16, True), (torch.float32, True), (torch.float32, False)):
        recipe: Recipe = DelayedScaling("E4M3", power_of_two=power_of_two)
        expected, trained = (train(rank, recipe, in_fp8, partial(sharded, dtype=dtype)) for in_fp8 in (False, True))
        # Rows of a rank: 23 of `up`, 16 of `down`.
        check_same(trained, expected, 23 * WIDTH + 16 * 45, dtype)
    recipe = CurrentScaling("E4M3")
    expected, trained = (train(rank, recipe, in_fp8, partial(sharded, dtype=torch.float32)) for in_fp8 in (False, True))
    torch.testing.assert_close(trained.found, expected.found, rtol=1e-2, atol=1e-5)


class Tied(nn.Module):
    """An embedding and a layer outside FP8 share a weight with an FP8 linear each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 16)
        self.plain, self.fp8, self.alone, self.head = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.plain.weight, self.head.weight = self.fp8.weight, self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in (self.plain, self.fp8, self.alone, self.head):
            x = layer(x)
        return x


def check_shared_weights_stay_as_they_are(rank: int) -> None:
    outputs, counted = [], []
    for in_fp8 in (False, True):
        model = Tied()
        scales = convert_to_fp8(model, DelayedScaling(), filter=lambda name, _: name != "plain")
        fully_shard(model, reshard_after_forward=True)
        if in_fp8:
            gather_weights_in_fp8(model)
        agree(scales)
        for _ in range(2):
            with Bytes() as gathered:
                output = model(torch.arange(16))
            step(scales)
        outputs.append(output)
        counted.append(gathered.num)
    assert torch.equal(*outputs)
    assert counted[0] - counted[1] == 16 * 8 * 3 - 16  # of the one that has a weight of its own


def check_what_is_not_training_records_nothing(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    scales = convert_to_fp8(model, DelayedScaling())
    fully_shard(model, reshard_after_forward=True)
    gather_weights_in_fp8(model)
    (meter,) = scales.meters
    for is_training, has_gradients, records in (
        (True, True, True),  # as it is
        (True, True, True),
        (True, False, False),
        (False, True, False),
        (False, False, False),
    ):
        scales.clear()
        with torch.set_grad_enabled(has_gradients):
            model.train(is_training)(torch.ones(2, 8))
        assert (meter.amax[:2] > 0).tolist() == [records] * 2


def check_a_weight_that_grows(rank: int) -> None:
    """It saturates once, is counted as it is and not as it was gathered, and is in range again at the next step."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    scales = convert_to_fp8(model, DelayedScaling(amax_history_len=1))
    nn.init.eye_(model[0].weight)
    fully_shard(model)
    gather_weights_in_fp8(model)
    scaler = DistributedGradScaler("cpu", init_scale=1.0, names=model, fp8=scales)
    optimizer = SGD(model.parameters(), lr=0.0)
    outputs = []
    for size in (1.0, 100.0, 100.0):
        with torch.no_grad():
            weight = model[0].weight
            assert isinstance(weight, DTensor)
            if rank == 1:  # the other half of it stays as it is
                weight.to_local().copy_(torch.eye(8)[4:] * size)
        output = model(torch.ones(1, 8))
        scaler.scale(output.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        outputs.append(output[0, [0, -1]].tolist())
    assert outputs == [[1.0, 1.0], [1.0, 448 / 256], [1.0, 96.0]]  # 1, 1.75 = the largest at scale 256, E4M3 of 100
    layer = model[0]
    assert isinstance(layer, Fp8Linear)
    assert layer.meter.scale[1] == scale_of_amax(torch.tensor(100.0), 448.0, scales.recipe)


def check_bad_weights_stay_bad(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    convert_to_fp8(model, DelayedScaling())
    fully_shard(model)
    gather_weights_in_fp8(model)
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        if rank == 1:
            weight.to_local()[0, 0] = torch.inf
    assert model(torch.ones(1, 8)).isnan().tolist() == [[False] * 4 + [True] + [False] * 3]


def check_mistakes() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="no FSDP2 unit of this model has the weight of an FP8 linear"):
        gather_weights_in_fp8(sharded(copy.deepcopy(model), torch.bfloat16))
    convert_to_fp8(model, DelayedScaling())
    sharded(model, torch.bfloat16)
    gather_weights_in_fp8(model)
    with pytest.raises(ConfigError, match="the weights of up are gathered in FP8 already"):
        gather_weights_in_fp8(model)


def ranks(rank: int) -> None:
    check_same_training(rank)
    check_shared_weights_stay_as_they_are(rank)
    check_what_is_not_training_records_nothing(rank)
    check_a_weight_that_grows(rank)
    check_bad_weights_stay_bad(rank)
    check_mistakes()


def test_weights_are_gathered_in_fp8() -> None:
    run_ranks(ranks, 2)
