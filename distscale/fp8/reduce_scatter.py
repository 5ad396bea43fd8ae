"""FSDP2: the reduce-scatter of a unit's gradients in FP8."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from distscale.errors import ConfigError
from distscale.fp8.sender import Sender, SenderMaker
from distscale.fp8.wire import Piece
from distscale.fsdp_units import param_groups

__all__ = ["Fp8ReduceScatter", "hook_fsdp2"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Fp8ReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes: torch's ``ReduceScatter``, for the one unit it was made for.

    FSDP2 hands over ``[world_size, row_numel]`` values and does not say whose they are. So ``group.post_backward`` of
    this unit notes which parameters have a gradient before it takes the gradients away. Where that does not add up to
    the values that come, because torch has changed, the call is left to the unit's own reduce-scatter, with a warning.

    Args:
        group: the unit's ``FSDPParamGroup``.
        pieces: one for each of ``group.fsdp_params``.
    """

    def __init__(self, sender: Sender, group: Any, pieces: Sequence[Piece]) -> None:
        self._sender = sender
        self._group = group
        self._pieces = pieces
        self._with_gradient: list[Piece] = []
        self._plain = group._reduce_scatter_comm
        self._has_warned = False
        self._post_backward: Callable[..., None] = group.post_backward
        group.post_backward = self._note_gradients

    def _note_gradients(self, *args: Any) -> None:
        params = zip(self._group.fsdp_params, self._pieces, strict=True)
        self._with_gradient = [piece for param, piece in params if _has_gradient(self._group, param)]
        self._post_backward(*args)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces ``input_tensor``, shape (world_size * row_numel,), into ``output_tensor``, shape (row_numel,).

        Collective: yes. It has ended, on this stream, when the call returns, whatever ``async_op`` says.
        """
        factor = _factor(op, group.size())
        numel = sum(piece.numel for piece in self._with_gradient) * group.size()
        if factor is None or numel != input_tensor.numel() or input_tensor.dtype not in _DTYPES:
            self._warn(input_tensor, op)
            return cast("dist.Work | None", self._plain(output_tensor, input_tensor, group, op, async_op))
        rows = input_tensor.view(group.size(), -1)
        output_tensor.copy_(self._sender.reduce(rows, self._with_gradient, group, factor))
        return None

    def _warn(self, input_tensor: Tensor, op: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"gradients of {self._pieces[0].name} and others are reduced without FP8: {input_tensor.numel()} "
                f"values of {input_tensor.dtype} under {op} do not fit what is known of these parameters",
                stacklevel=2,
            )


def hook_fsdp2(model: nn.Module, names: Mapping[nn.Parameter, str], make: SenderMaker) -> None:
    """Puts an :class:`Fp8ReduceScatter` into every FSDP2 unit of ``model``.

    Args:
        names: of the parameters of the model.
        make: called with the parameters of each unit.

    Raises:
        ConfigError: if a unit has parameters on several meshes, or some that are not of ``model``, or has an
            :class:`Fp8ReduceScatter` already.
    """
    for unit in list(_units(model)):
        (group,) = param_groups(unit)
        params = {param.sharded_param: param.padded_sharded_param_size.numel() for param in group.fsdp_params}
        if any(param not in names for param in params):
            raise ConfigError(
                f"the FSDP2 unit of {type(model).__name__} has parameters of other modules, too, with which it was "
                "sharded: give send_gradients_in_fp8 a module that has all of them, as the whole model"
            )
        sender = make({names[param]: param for param in params})
        pieces = [Piece(names[param], numel, names[param] in sender.names) for param, numel in params.items()]
        unit.set_custom_reduce_scatter(cast(Any, Fp8ReduceScatter(sender, group, pieces)))


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    """Those that have parameters, each once: modules that were sharded together are one unit."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        groups = param_groups(module) if isinstance(module, FSDPModule) else []
        if len(groups) > 1:
            raise ConfigError(
                f"the FSDP2 unit {name or type(module).__name__} has parameters on {len(groups)} meshes, and torch "
                "lets no one replace their reduce-scatter; make each a unit of its own"
            )
        if groups and isinstance(groups[0]._reduce_scatter_comm, Fp8ReduceScatter) and groups[0] not in seen:
            raise ConfigError(f"the gradients of {name or type(module).__name__} are sent in FP8 already")
        if groups and groups[0] not in seen:
            seen.append(groups[0])
            assert isinstance(module, FSDPModule)
            yield module


def _has_gradient(group: Any, param: Any) -> bool:
    """Whether ``FSDPParamGroup.post_backward`` will reduce a gradient of ``param``."""
    if not hasattr(param, "_unsharded_param"):  # not gathered yet
        return False
    unsharded = param.unsharded_param
    sends_zeros = getattr(group, "reduce_scatter_unused_params", False) and unsharded.requires_grad
    return param.unsharded_accumulated_grad is not None or unsharded.grad is not None or sends_zeros


def _factor(op: Any, world_size: int) -> float | None:
    """By which ``op`` multiplies the sum; None if it is not known."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    factor = getattr(op, "factor", None) if op == dist.ReduceOp.PREMUL_SUM else None
    return factor if isinstance(factor, float) else None
