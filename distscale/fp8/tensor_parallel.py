"""A linear layer on shards of DTensors: each rank multiplies what it holds, and says what the result is a shard of.

On each mesh axis, with d the last dim of the input::

    weight      input      output     gradient of input   of weight   bias        its gradient
    Shard(0)    Replicate  Shard(d)   Partial             Shard(0)    Shard(0)    Shard(0)      ColwiseParallel
    Shard(1)    Shard(d)   Partial    Shard(d)            Shard(1)    Replicate   Replicate     RowwiseParallel
    Replicate   Shard(i)   Shard(i)   Shard(i)            Partial     Replicate   Partial       tokens are sharded
    Replicate   Replicate  Replicate  Replicate           Replicate   Replicate   Replicate
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distscale.errors import ConfigError

__all__ = ["multiply_shards"]


class _Layout(NamedTuple):
    """A row of the table above, without the weight."""

    input: Placement
    output: Placement
    grad_input: Placement
    grad_weight: Placement
    bias: Placement
    grad_bias: Placement


def multiply_shards(
    input: Tensor, weight: DTensor, bias: Tensor | None, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The output of a linear layer as a DTensor, from a product of local tensors.

    Args:
        input: DTensor, shape (..., in_features).
        weight: shape (out_features, in_features).
        bias: DTensor, shape (out_features,).
        multiply: (local input, local weight) -> local ``input @ weight.t()``.

    Raises:
        ConfigError: if ``input`` is no DTensor on the mesh of ``weight``.

    Collective: where ``input`` is not laid out as the table says, and in the backward pass, on the mesh of ``weight``.
    """
    mesh = weight.device_mesh
    if not isinstance(input, DTensor) or input.device_mesh != mesh:
        raise ConfigError(
            "the weight of an Fp8Linear is a DTensor, and its input is not one on the same mesh: use "
            "parallelize_module with ColwiseParallel or RowwiseParallel, or DTensor.from_local"
        )
    layouts = [
        _layout(*placements, input.dim() - 1) for placements in zip(weight.placements, input.placements, strict=True)
    ]
    inputs, outputs, grad_inputs, grad_weights, biases, grad_biases = zip(*layouts, strict=True)
    local = multiply(
        input.redistribute(placements=inputs).to_local(grad_placements=grad_inputs),
        weight.to_local(grad_placements=grad_weights),
    )
    if bias is not None:
        assert isinstance(bias, DTensor)
        local_bias = bias.redistribute(placements=biases).to_local(grad_placements=grad_biases).to(local.dtype)
        adds = all(not output.is_partial() or mesh.get_local_rank(axis) == 0 for axis, output in enumerate(outputs))
        local = local + _AddedOnce.apply(local_bias, adds)  # type: ignore[no-untyped-call]
    shape = torch.Size([*input.shape[:-1], len(weight)])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, outputs, run_check=False, shape=shape, stride=stride)


def _layout(weight: Placement, input: Placement, last: int) -> _Layout:
    if weight.is_shard(0):
        return _Layout(Replicate(), Shard(last), Partial(), Shard(0), Shard(0), Shard(0))
    if weight.is_shard(1):
        return _Layout(Shard(last), Partial(), Shard(last), Shard(1), Replicate(), Replicate())
    if isinstance(input, Shard) and input.dim != last:
        return _Layout(input, input, input, Partial(), Replicate(), Partial())
    return _Layout(*[Replicate()] * 6)


class _AddedOnce(torch.autograd.Function):
    """A bias that one rank adds to its part of a sum, and the others do not. All of them see its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, adds: bool) -> Tensor:
        return bias.clone() if adds else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
