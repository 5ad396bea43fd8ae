"""A linear layer on shards of DTensors: each rank multiplies what it holds, and says what the result is a shard of.

On each mesh axis, with d the last dim of the input::

    weight      input      output     gradient of input   of weight
    Shard(0)    Replicate  Shard(d)   Partial             Shard(0)     ColwiseParallel
    Shard(1)    Shard(d)   Partial    Shard(d)            Shard(1)     RowwiseParallel
    Replicate   Shard(i)   Shard(i)   Shard(i)            Partial      tokens are sharded
    Replicate   Replicate  Replicate  Replicate           Replicate
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
        _layout(held, given, input.dim() - 1) for held, given in zip(weight.placements, input.placements, strict=True)
    ]
    inputs, outputs, grad_inputs, grad_weights = zip(*layouts, strict=True)
    local = multiply(
        input.redistribute(placements=inputs).to_local(grad_placements=grad_inputs),
        weight.to_local(grad_placements=grad_weights),
    )
    shape = torch.Size([*input.shape[:-1], len(weight)])
    output = DTensor.from_local(
        local, mesh, outputs, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )
    return output if bias is None else output + _like_output(bias.to(output.dtype), outputs)


def _layout(weight: Placement, input: Placement, last: int) -> _Layout:
    if weight.is_shard(0):
        return _Layout(Replicate(), Shard(last), Partial(), Shard(0))
    if weight.is_shard(1):
        return _Layout(Shard(last), Partial(), Shard(last), Shard(1))
    if isinstance(input, Shard) and input.dim != last:
        return _Layout(input, input, input, Partial())
    return _Layout(Replicate(), Replicate(), Replicate(), Replicate())


def _like_output(bias: Tensor, outputs: Sequence[Placement]) -> Tensor:
    """The bias as part of a sum where the output is one: the sum then stays to be done, by a reduce-scatter for one."""
    assert isinstance(bias, DTensor)
    return bias.redistribute(
        placements=[
            Partial() if output.is_partial() else held for held, output in zip(bias.placements, outputs, strict=True)
        ]
    )
