"""FSDP2: the all-gather of a unit's weights in FP8."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distscale.errors import ConfigError
from distscale.fp8.cast import cast_by_own_amax
from distscale.fp8.collectives import all_gather
from distscale.fp8.linear import Fp8Linear
from distscale.fp8.product import WEIGHT

__all__ = ["Fp8AllGather", "gather_weights_in_fp8"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALE_BYTES = 4
_ALIGNMENT = 16


def gather_weights_in_fp8(model: nn.Module) -> None:
    """Makes FSDP2 gather the weights of FP8 linears in FP8; before the first step, on all ranks alike.

    ::

        scales = convert_to_fp8(model, DelayedScaling())
        fully_shard(model)
        gather_weights_in_fp8(model)

    A layer casts its weight in any case; by the scale that the ranks have agreed on, what is gathered so gives the same
    products, for one byte a value. Without a scale a shard would be cast by its own amax, and again by that of the
    whole: so the weights of a unit are gathered as they are in its first step. (A weight of zeros alone, or whose
    layer does not run then, has none after it either, and ``CurrentScaling`` never has: they are rounded twice.) A
    compiled layer is compiled once more after that step.

    Gathered as they are, too: all other parameters; a weight that more than one module has, for not all of them may
    multiply in FP8; and what is gathered after ``reshard_after_forward`` to another number of ranks than all.

    Raises:
        ConfigError: if no FSDP2 unit has the weight of an FP8 linear alone, one has parameters on several meshes, or
            the weights are gathered in FP8 already.
    """
    from torch.distributed.fsdp import FSDPModule

    from distscale.fsdp_units import param_groups

    num_owners = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    linears = {
        id(module.weight): module
        for module in model.modules()
        if isinstance(module, Fp8Linear) and num_owners[id(module.weight)] == 1
    }
    has_any = False
    seen: list[Any] = []
    for name, unit in model.named_modules():
        for group in param_groups(unit) if isinstance(unit, FSDPModule) else []:
            parts = [
                _Part(param.padded_sharded_param_size.numel(), linears.get(id(param.sharded_param)))
                for param in group.fsdp_params
            ]
            if group in seen or not any(part.linear for part in parts):
                continue
            seen.append(group)
            if isinstance(group._all_gather_comm, Fp8AllGather):
                raise ConfigError(f"the weights of {name or type(model).__name__} are gathered in FP8 already")
            if len(param_groups(unit)) > 1:
                raise ConfigError(
                    f"the FSDP2 unit {name or type(model).__name__} has parameters on several meshes, and torch lets "
                    "no one replace their all-gather; make each a unit of its own"
                )
            unit.set_custom_all_gather(cast(Any, Fp8AllGather(parts, group._all_gather_comm)))
            has_any = True
    if not has_any:
        raise ConfigError(
            "no FSDP2 unit of this model has the weight of an FP8 linear that no other module has, too: call "
            "convert_to_fp8, then fully_shard, then gather_weights_in_fp8"
        )


class _Part(NamedTuple):
    """One parameter of a unit."""

    numel: int
    """Of the shard of a rank, with padding."""
    linear: Fp8Linear | None
    """The layer whose weight it is, and no one else's."""


class Fp8AllGather:
    """What ``FSDPModule.set_custom_all_gather`` takes: torch's ``AllGather``, for the one unit it was made for.

    The message of a rank: the scale of each weight in fp32, its amax bits in int32, parameters that are not in FP8,
    weights, zeros up to a multiple of 16 bytes. Scales are those of the layers, or of the shard itself where those are
    not known. What a layer then records is the amax that the weight had before.

    In FP8 only after a step in which the unit was gathered, and so seen: the same step on all ranks.

    Args:
        parts: the parameters of the unit, in its order.
        plain: the unit's own all-gather, for what does not fit the parts.
    """

    def __init__(self, parts: Sequence[_Part], plain: Any) -> None:
        self._parts = parts
        self._numels = [part.numel for part in parts]
        self._plain = plain
        self._linears = [part.linear for part in parts if part.linear is not None]
        self._first_steps: list[int] | None = None
        """In which the unit was first gathered, by the count of each layer's meter."""
        self._has_warned = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return cast(Tensor, self._plain.allocate(size, dtype=dtype, device=device))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gathers ``input_tensor``, shape (row_numel,), into ``output_tensor``, shape (world_size * row_numel,).

        Collective: yes. It has ended, on this stream, when the call returns, whatever ``async_op`` says.
        """
        fits = input_tensor.numel() == sum(self._numels) and input_tensor.dtype in _DTYPES
        if not fits or group.size() == 1 or not self._has_scales():
            self._warn(fits, input_tensor)
            return cast("dist.Work | None", self._plain(output_tensor, input_tensor, group, async_op))
        message = self._pack(input_tensor)
        messages = message.new_empty(group.size(), len(message))
        all_gather(messages.view(-1), message, group)
        self._unpack(messages, output_tensor.view(group.size(), -1))
        return None

    def _has_scales(self) -> bool:
        steps = [linear.meter.num_steps for linear in self._linears]
        self._first_steps = self._first_steps or steps
        return all(step > first for step, first in zip(steps, self._first_steps, strict=True))

    def _pack(self, row: Tensor) -> Tensor:
        scales, amax, plain, weights = [], [], [], []
        for part, values in zip(self._parts, row.split_with_sizes(self._numels), strict=True):
            if part.linear is None:
                plain.append(values.view(torch.uint8))
                continue
            meter, recipe = part.linear.meter, part.linear.recipe
            meter.move(values.device)
            fp8, scale, bits = cast_by_own_amax(
                values, recipe.dtype_of(meter.tensors[WEIGHT]), recipe, meter.scale[WEIGHT]
            )
            scales.append(scale.view(1).view(torch.uint8))
            amax.append(bits.view(1).view(torch.uint8))
            weights.append(fp8.view(torch.uint8))
        message = torch.cat([*scales, *amax, *plain, *weights])
        return torch.nn.functional.pad(message, (0, -len(message) % _ALIGNMENT))

    def _unpack(self, messages: Tensor, rows: Tensor) -> None:
        """From uint8, shape (world_size, message bytes), to shape (world_size, row_numel)."""
        num_weights = len(self._linears)
        at_amax, at_plain = _SCALE_BYTES * num_weights, 2 * _SCALE_BYTES * num_weights
        scales = messages[:, :at_amax].view(torch.float32)
        amax = messages[:, at_amax:at_plain].view(torch.int32).amax(dim=0)
        at_weight = at_plain + rows.element_size() * sum(part.numel for part in self._parts if part.linear is None)
        index = 0
        for part, values in zip(self._parts, rows.split_with_sizes(self._numels, dim=1), strict=True):
            if part.linear is None:
                end = at_plain + part.numel * rows.element_size()
                values.copy_(messages[:, at_plain:end].view(rows.dtype))
                at_plain = end
                continue
            fp8 = messages[:, at_weight : at_weight + part.numel].view(
                part.linear.recipe.dtype_of(part.linear.meter.tensors[WEIGHT])
            )
            values.copy_(fp8.float() / scales[:, index, None])
            part.linear.meter.before_rounding[WEIGHT] = amax[index]
            index, at_weight = index + 1, at_weight + part.numel

    def _warn(self, fits: bool, input_tensor: Tensor) -> None:
        if not fits and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"weights are gathered without FP8: {input_tensor.numel()} values of {input_tensor.dtype} do not fit "
                "what is known of the parameters of their FSDP2 unit",
                stacklevel=2,
            )
