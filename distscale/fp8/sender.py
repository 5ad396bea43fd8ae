"""Sender: reduces gradients over a process group in FP8, with the scales of its meter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distscale.checksum import digest
from distscale.errors import DesyncError
from distscale.fp8.collectives import all_gather
from distscale.fp8.feedback import Feedback
from distscale.fp8.keeper import Fp8Scales
from distscale.fp8.wire import Layout, Piece, make_layout, metered
from distscale.fp8.wire_kernels import quantize, sum_rows
from distscale.fp8.wire_reference import dequantize

__all__ = ["Sender", "Traffic", "WireOptions"]


@dataclass(frozen=True)
class WireOptions:
    """How gradients are sent; see :func:`~distscale.fp8.send_gradients_in_fp8`. Equal on all ranks."""

    is_blockwise: bool = False
    stochastic_rounding: bool = False
    error_feedback: bool = False
    gathers_in_fp8: bool = False
    seed: int = 0
    prefix: str = ""


@dataclass
class Traffic:
    """What this rank has sent to others to have gradients reduced; of HSDP, between shards alone."""

    num_bytes: int = 0
    num_values: int = 0
    """Gradient values in these bytes, padding included; so fp32 would have taken 4 bytes for each."""

    def count(self, num_peers: int, num_bytes: int, num_values: int) -> None:
        """A message to each of ``num_peers``."""
        self.num_bytes += num_peers * num_bytes
        self.num_values += num_peers * num_values


SenderMaker: TypeAlias = Callable[[Mapping[str, nn.Parameter]], "Sender"]
"""Makes the sender of the gradients of some parameters, by name; it has those in ``names`` that go in FP8."""


class _Plan(NamedTuple):
    layout: Layout
    entries: Tensor
    """int64, shape (num_fp8,): of the meter."""


class Sender:
    """The gradients of a few parameters, which are reduced together: those of an FSDP unit, or of a DDP model.

    Args:
        names: of the parameters whose gradients go in FP8.
    """

    def __init__(self, names: Sequence[str], scales: Fp8Scales, options: WireOptions, traffic: Traffic) -> None:
        self.meter = scales.meter([metered(options.prefix + name) for name in names])
        self.recipe = scales.recipe
        self.options = options
        self.traffic = traffic
        self.names = {name: entry for entry, name in enumerate(names)}
        """Of the parameters whose gradients go in FP8, and their entries of the meter."""
        self._plans: dict[tuple[Piece, ...], _Plan] = {}
        self.num_calls = 0
        self.feedback: Feedback | None = None
        if options.error_feedback:
            self.feedback = Feedback(self.names)
            scales.listeners.append(self.feedback.end_step)

    def reduce(self, rows: Tensor, pieces: Iterable[Piece], group: dist.ProcessGroup, factor: float) -> Tensor:
        """Sums row ``r`` of all ranks on rank ``r``: an all-to-all of FP8, and a sum of what arrives in fp32.

        Collective: yes. Syncs host: on the CPU only.

        Args:
            rows: fp32, bf16 or fp16, shape (world_size, row_numel).
            pieces: what lies in a row.
            factor: by which the sum is multiplied.

        Returns:
            fp32, shape (row_numel,): this rank's row. It is not finite where a gradient was not on any rank.

        Raises:
            DesyncError: on the CPU, if another rank reduces other tensors at this point, or with another recipe. On
                other devices, where asking would make the host wait, the result is NaN then, so the step is skipped.
        """
        self.meter.move(rows.device)
        layout, entries = self._plan(tuple(pieces), rows.device)
        if self.feedback is not None:
            rows = self.feedback.add(rows, layout)
        messages, bits, num_saturated = quantize(rows, layout, self.meter.scale[entries], self._key(layout))
        if self.feedback is not None:
            self.feedback.keep(rows, layout, messages)
        self.meter.amax.scatter_reduce_(0, entries, bits, "amax")
        self.meter.num_saturated.index_add_(0, entries, num_saturated)
        received = torch.empty_like(messages)
        dist.all_to_all_single(received, messages, group=group)
        self.traffic.count(len(rows) - 1, layout.row_bytes, layout.row_numel)
        if received.device.type == "cpu":
            _check_identity(received, layout, group)
        return sum_rows(received, layout, factor)

    def gather(self, row: Tensor, pieces: Iterable[Piece], group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        """All rows, of each rank the one it has reduced: shape (world_size, row_numel), the same bits everywhere.

        They go in 16 bits, or in FP8 with the scale of the row's own amax. Collective: yes. Syncs host: no.

        Args:
            row: fp32, shape (row_numel,).
            dtype: that is wanted in the end.
        """
        if not self.options.gathers_in_fp8:
            row = row.to(dtype if dtype.itemsize == 2 else torch.bfloat16)
            rows = row.new_empty(group.size(), row.numel())
            all_gather(rows, row[None], group)
            self.traffic.count(group.size() - 1, row.nbytes, row.numel())
            return rows
        layout, entries = self._plan(tuple(pieces), row.device)
        unknown = torch.zeros(len(entries), device=row.device)
        message = quantize(row[None], layout, unknown, self._key(layout)).messages
        messages = message.new_empty(group.size(), layout.row_bytes)
        all_gather(messages, message, group)
        self.traffic.count(group.size() - 1, layout.row_bytes, layout.row_numel)
        return dequantize(messages, layout)

    def _plan(self, pieces: tuple[Piece, ...], device: torch.device) -> _Plan:
        plan = self._plans.get(pieces)
        if plan is None:
            layout = make_layout(pieces, self.recipe, self.options.is_blockwise)
            entries = [self.names[segment.piece.name] for segment in layout.in_fp8]
            plan = _Plan(layout, torch.tensor(entries, dtype=torch.int64, device=device))
            self._plans[pieces] = plan
        return plan

    def _key(self, layout: Layout) -> int | None:
        """For stochastic rounding: another one for each rank, call and unit."""
        self.num_calls += 1
        if not self.options.stochastic_rounding:
            return None
        return digest((self.options.seed, dist.get_rank(), self.num_calls, layout.identity))


def _check_identity(received: Tensor, layout: Layout, group: dist.ProcessGroup) -> None:
    identities = received[:, :4].view(torch.int32).flatten().tolist()
    others = [dist.get_global_rank(group, rank) for rank, found in enumerate(identities) if found != layout.identity]
    if others:
        names = [segment.piece.name for segment in layout.segments]
        raise DesyncError(
            f"ranks {others} sent gradients of other tensors than this one, or with another recipe: here they are of "
            f"{names[0]} and {len(names) - 1} more; every rank must use the same parameters in the same step"
        )
