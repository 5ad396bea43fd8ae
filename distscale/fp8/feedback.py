"""Error feedback: what rounding took away from a gradient is added to it at the next step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distscale.errors import ConfigError
from distscale.fp8.wire import Layout
from distscale.fp8.wire_reference import dequantize

__all__ = ["Feedback"]


class Feedback:
    """The residuals of the gradients of one sender, by parameter: fp32, shape (world_size, numel).

    They carry the loss scale of their step, and follow it when it changes. A step that was skipped leaves them as they
    were before it: the gradients that they were added to were not used. Nothing here syncs the host.

    Args:
        names: of the parameters, and their entries of ``_carry``.
    """

    def __init__(self, names: Mapping[str, int]) -> None:
        self.residuals: dict[str, Tensor] = {}
        """Of steps that were applied."""
        self._names = names
        self._carry = torch.ones(len(names))
        """fp32, shape (num_parameters,): by which ``residuals`` are to be multiplied before they are added."""
        self._pending: dict[str, Tensor] = {}
        """Of the step that goes on, of which nobody knows yet whether it will be applied."""

    def end_step(self, found_inf: Tensor, loss_scale: Tensor, next_loss_scale: Tensor) -> None:
        """A listener of :class:`~distscale.fp8.Fp8Scales`."""
        for name, pending in self._pending.items():
            before = self.residuals.get(name)
            kept = torch.zeros_like(pending) if before is None else self._carried(name, before.to(pending.device))
            is_applied = found_inf.to(pending.device, non_blocking=True) == 0
            self.residuals[name] = torch.where(is_applied, pending, kept)
            self._carry[self._names[name]].fill_(1.0)
        self._pending = {}
        self._carry *= (next_loss_scale / loss_scale).to(self._carry.device, non_blocking=True)

    def add(self, rows: Tensor, layout: Layout) -> Tensor:
        """The gradients with their residuals: fp32, shape (world_size, row_numel).

        Raises:
            ConfigError: if residuals were loaded that another layout has left.
        """
        rows = rows.to(torch.float32, copy=True)
        self._carry = self._carry.to(rows.device)
        for segment in layout.in_fp8:
            name = segment.piece.name
            values = rows[:, segment.start : segment.stop]
            if name in self._pending:  # of another micro-batch
                values += self._pending[name]
            elif name in self.residuals:
                residual = self.residuals[name].to(rows.device)
                if residual.shape != values.shape:
                    raise ConfigError(
                        f"the residuals of {name} are of gradients that were sharded otherwise: of shape "
                        f"{tuple(residual.shape)}, not {tuple(values.shape)}; do not load them into another layout"
                    )
                values += self._carried(name, residual)
        return rows

    def keep(self, rows: Tensor, layout: Layout, messages: Tensor) -> None:
        """Keeps what ``messages`` lack of ``rows``, where it is finite."""
        lost = rows - dequantize(messages, layout)
        lost = torch.where(lost.isfinite(), lost, 0.0)
        for segment in layout.in_fp8:
            self._pending[segment.piece.name] = lost[:, segment.start : segment.stop].contiguous()

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals of this rank, by name of the parameter, under the loss scale of the coming step."""
        return {name: self._carried(name, residual) for name, residual in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`state_dict` gave, of the same rank among as many; without what is not there."""
        self.residuals = {name: residual.clone() for name, residual in state.items() if name in self._names}
        self._pending = {}
        self._carry.fill_(1.0)

    def _carried(self, name: str, residual: Tensor) -> Tensor:
        return residual * self._carry[self._names[name]].to(residual.device, non_blocking=True)
