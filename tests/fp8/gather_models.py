"""A model whose weights are gathered in FP8, its training, and the bytes that this takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from distscale import DistributedGradScaler
from distscale.fp8 import Recipe, convert_to_fp8, gather_weights_in_fp8

__all__ = ["WIDTH", "Bytes", "Model", "Trained", "check_same", "sharded", "train"]

WIDTH = 31  # uneven over two ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 45)
        self.down = nn.Linear(45, WIDTH, bias=False)
        with torch.no_grad():  # of many sizes, so that a shard has another scale than the whole
            for layer in (self.up, self.down):
                layer.weight *= torch.randn(len(layer.weight), 1).mul(3).exp().clamp(max=1.0)
                layer.weight[len(layer.weight) // 2 + 1 :] *= 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Bytes:
    """Counts what is given to all-gathers."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> Bytes:
        names = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
        self._all = {name: getattr(dist, name) for name in names}
        for name, gather in self._all.items():

            def counted(output: Tensor, input: Tensor, *args: Any, _gather: Any = gather, **kwargs: Any) -> Any:
                self.num += input.nbytes
                return _gather(output, input, *args, **kwargs)

            setattr(dist, name, counted)
        return self

    def __exit__(self, *_: object) -> None:
        for name, gather in self._all.items():
            setattr(dist, name, gather)


def sharded(model: nn.Module, dtype: torch.dtype, mesh: DeviceMesh | None = None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Trained(NamedTuple):
    found: list[Tensor]
    """Losses, and weights."""
    fp8: dict[str, str]
    """State of the scales."""
    num_bytes: list[int]
    """Gathered in each step."""


def train(seed: int, recipe: Recipe, in_fp8: bool, lay_out: Callable[[Model], object]) -> Trained:
    """Four steps on input of this seed; with weights that are gathered in FP8, or not."""
    model = Model()
    scales = convert_to_fp8(model, recipe)
    lay_out(model)
    if in_fp8:
        gather_weights_in_fp8(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = DistributedGradScaler("cpu", init_scale=16.0, names=model, fp8=scales)
    generator = torch.Generator().manual_seed(seed)
    found, counted = [], []
    for _ in range(4):
        optimizer.zero_grad()
        with Bytes() as gathered:
            loss = model(torch.randn(8, WIDTH, generator=generator)).float().square().mean()
            scaler.scale(loss).backward()
        counted.append(gathered.num)
        scaler.step(optimizer)
        scaler.update()
        assert not scaler.last_step.skipped
        found.append(loss.detach())
    for param in model.parameters():
        assert isinstance(param, DTensor)
        found.append(param.full_tensor().detach())
    return Trained(found, scales.state_dict(), counted)


def check_same(trained: Trained, expected: Trained, num_weights: int, dtype: torch.dtype) -> None:
    """The same training bit by bit, from the first step on; but for the bytes of weights, from the second.

    Args:
        num_weights: elements of a rank's shards, with padding.
        dtype: in which they are gathered otherwise.
    """
    assert all(map(torch.equal, trained.found, expected.found))
    assert trained.fp8 == expected.fp8
    assert trained.num_bytes[0] == expected.num_bytes[0]  # without a history
    for num_plain, num_bytes in zip(expected.num_bytes[1:], trained.num_bytes[1:], strict=True):
        # In the forward and in the backward pass.
        assert num_plain - num_bytes > 2 * (num_weights * (dtype.itemsize - 1) - 64)
