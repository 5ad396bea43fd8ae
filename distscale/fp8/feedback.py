"""Error feedback: what rounding took away from a gradient is added to it at the next step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distscale.fp8.wire import Layout
from distscale.fp8.wire_reference import dequantize

__all__ = ["Feedback"]


class Feedback:
    """The residuals of the gradients of one sender, by parameter: fp32, shape (world_size, numel).

    They carry the loss scale of their step, and follow it when it changes. A step that was skipped leaves none: the
    gradients that lacked them were not used. Nothing here syncs the host.

    Args:
        names: of the parameters, and their entries of ``_carry``.
    """

    def __init__(self, names: Mapping[str, int]) -> None:
        self.residuals: dict[str, Tensor] = {}
        self._names = names
        self._carry = torch.ones(len(names))
        """fp32, shape (num_parameters,): by which residuals are to be multiplied before they are added."""

    def end_step(self, found_inf: Tensor, loss_scale: Tensor, next_loss_scale: Tensor) -> None:
        """A listener of :class:`~distscale.fp8.Fp8Scales`."""
        carried = torch.where(found_inf == 0, next_loss_scale / loss_scale, 0.0)
        self._carry *= carried.to(self._carry.device, non_blocking=True)

    def add(self, rows: Tensor, layout: Layout) -> Tensor:
        """The gradients with their residuals: fp32, shape (world_size, row_numel)."""
        rows = rows.to(torch.float32, copy=True)
        self._carry = self._carry.to(rows.device)
        for segment in layout.in_fp8:
            residual = self.residuals.get(segment.piece.name)
            if residual is not None:
                carry = self._carry[self._names[segment.piece.name]]
                rows[:, segment.start : segment.stop].addcmul_(residual.to(rows.device), carry)
        return rows

    def keep(self, rows: Tensor, layout: Layout, messages: Tensor, entries: Tensor) -> None:
        """Keeps what ``messages`` lack of ``rows``, where it is finite."""
        lost = rows - dequantize(messages, layout)
        lost = torch.where(lost.isfinite(), lost, 0.0)
        for segment in layout.in_fp8:
            self.residuals[segment.piece.name] = lost[:, segment.start : segment.stop].contiguous()
        self._carry.index_fill_(0, entries, 1.0)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals of this rank, by name of the parameter, under the loss scale of the coming step."""
        return {name: residual * self._carry[self._names[name]] for name, residual in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`state_dict` gave, of the same rank among as many."""
        self.residuals = {name: residual.clone() for name, residual in state.items() if name in self._names}
        self._carry.fill_(1.0)
