"""One decision on its way from the reduced vectors to the host: what it says, and what it forbids."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distscale.errors import DesyncError, ProtocolError
from distscale.exchange import Agreed, Flag, Verdict, read_agreed, read_culprit, read_flag, read_sides, read_slots
from distscale.policy import Outcome, ScaleState
from distscale.record import ByTensor, Culprit, HostCopy, StepReport
from distscale.table import HINTS, SlotTable, check_equal

__all__ = ["Decision"]

_SHOWN_AS_FLOAT = (Agreed.SCALE, Agreed.LOSS_SCALE)


@dataclass
class Decision:
    """Device tensors of one exchange, and what the host can read from them once their copy has arrived."""

    step: int
    table: SlotTable
    has_norm: bool
    maxima: Tensor
    """int32: reduced, see :mod:`distscale.exchange`."""
    verdict: Verdict
    loss_scale: Tensor
    """fp32, shape (): the scale that the gradients carried."""
    outcome: Outcome
    """Of this and all earlier decisions since the last update."""
    next_state: ScaleState
    """Of the policy, if nothing else happens before ``update()``."""
    num_saturated: Tensor | None = None
    """float64, shape (num_sent,): values beyond the scale of each FP8 tensor that was sent; None without such."""
    _copy: HostCopy | None = None
    _is_read: bool = False

    def _send(self) -> None:
        """Starts the copy to the host. Syncs host: no."""
        numbers = (
            self.verdict.found_inf,
            self.loss_scale,
            self.next_state.scale,
            self.next_state.blocked_steps,
            self.verdict.grad_norm,
            self.verdict.clip_coef,
            self.verdict.is_rehearsal,
        )
        device = self.maxima.device
        copied = [self.maxima, torch.stack([number.to(device).double() for number in numbers])]
        self._copy = HostCopy(copied if self.num_saturated is None else [*copied, self.num_saturated])

    @property
    def fp8_bits(self) -> Tensor:
        """int32: amax bits of the FP8 tensors, over all ranks, in the order of the table. Syncs host: no."""
        return self.maxima[len(self.maxima) - len(self.table.fp8) :]

    def settle(self, next_state: ScaleState) -> None:
        """Notes the state that the update has committed, and sends whatever the host does not have yet."""
        if self._copy is None or next_state is not self.next_state:
            self.next_state = next_state
            self._send()

    @property
    def is_at_hand(self) -> bool:
        """Whether the host can read it without waiting for a device, by what it has done before, not by chance."""
        return self._is_read or (self._copy is not None and self._copy.is_instant)

    @property
    def skipped(self) -> bool:
        return bool(self._read()[1][0])

    @property
    def scale(self) -> float:
        return float(self._read()[1][1])

    @property
    def next_scale(self) -> float:
        return float(self._read()[1][2])

    @property
    def grad_norm(self) -> float:
        """NaN if none was asked for."""
        return float(self._read()[1][4])

    @property
    def blocked_steps(self) -> int:
        return int(self._read()[1][3])

    @property
    def clip_coef(self) -> float:
        return float(self._read()[1][5])

    @property
    def is_rehearsal(self) -> bool:
        return bool(self._read()[1][6])

    def report(self) -> StepReport:
        """Syncs host: yes, for the copy of this decision alone."""
        maxima, numbers, *num_saturated = self._read()
        found_inf, scale, next_scale, _, grad_norm, clip_coef, _ = map(float, numbers)
        amax = read_slots(maxima)
        num_gradients = len(self.table.names)
        fp8_names = [tensor.name for tensor in self.table.fp8]
        units = [scale if tensor.is_gradient else 1.0 for tensor in self.table.fp8]
        return StepReport(
            step=self.step,
            skipped=bool(found_inf),
            scale=scale,
            next_scale=next_scale,
            grad_norm=grad_norm if self.has_norm else None,
            clip_coef=clip_coef if self.has_norm and not found_inf else None,
            culprit=self._culprit(maxima),
            amax=ByTensor(self.table.names, amax[:num_gradients]),
            vetoed_by=read_flag(maxima, Flag.VETO),
            stop_requested=read_flag(maxima, Flag.STOP) is not None,
            fp8_amax=ByTensor(fp8_names, amax[num_gradients:] / np.array(units)),
            num_saturated=ByTensor(fp8_names[: self.table.num_sent], *num_saturated),
        )

    def raise_if_broken(self, gather_values: Callable[[], list[dict[str, object]]] | None = None) -> None:
        """Raises if the ranks could not decide; the step was then applied on none of them. Syncs host: yes.

        Args:
            gather_values: returns every rank's agreed values, so that an error can name all ranks. A collective, called
                only if ranks differ and all of them read their decision now; None if it is read later, when an error
                names the first and the last rank on each side.

        Raises:
            DesyncError: if an agreed value differs between ranks.
            ProtocolError: if a rank failed before the exchange, or none has scaled a loss.
        """
        maxima = self._read()[0]
        failed = read_flag(maxima, Flag.FAILED)
        if failed is not None:
            raise ProtocolError(
                f"rank {failed} failed before the exchange of step {self.step}, so no rank applied it; "
                "that rank's own error says why"
            )
        differing = read_agreed(maxima)
        if differing and gather_values is not None and read_flag(maxima, Flag.UNREAD) is None:
            check_equal(gather_values(), f"at step {self.step}")
        sides = _shown_sides(read_sides(maxima))
        for key, low, high in differing:
            if key is Agreed.TABLE and low < 0:
                raise DesyncError(
                    f"at step {self.step} some ranks stepped an optimizer that is new or has new parameters, and "
                    f"others did not{sides}. All ranks must add optimizers and parameters at the same step; no rank "
                    "applied it"
                )
            values = [_shown(key, bits) for bits in (low, high)]
            what = key.label + (" or the settings" if key is Agreed.TABLE else "")
            raise DesyncError(
                f"ranks differ in {what} at step {self.step}: from {values[0]} to {values[1]}{sides}. "
                f"It must be equal on all ranks; no rank applied the step{HINTS.get(key.name.lower(), '')}"
            )
        if read_flag(maxima, Flag.SCALED) is None and not self.is_rehearsal:
            raise ProtocolError(
                "step() was called, but no rank has called scaler.scale(loss): the gradients would be divided by a "
                "scale that their loss was never multiplied with. Use scaler.scale(loss).backward()"
            )

    def _culprit(self, maxima: np.ndarray) -> Culprit | None:
        found = read_culprit(maxima, self.table.num_decisive)
        if found is None:
            return None
        slot, rank, is_nan = found
        names = [*self.table.names, *(tensor.name for tensor in self.table.fp8)]
        return Culprit(rank, "loss" if slot is None else names[slot], "nan" if is_nan else "inf")

    def _read(self) -> list[np.ndarray]:
        if self._copy is None:
            self._send()
        assert self._copy is not None
        self._is_read = True
        return self._copy.read()


def _shown_sides(sides: list[tuple[int, int]]) -> str:
    # The one that is odd first.
    groups = sorted(sides, key=lambda side: (side[1] - side[0], side))
    shown = [f"rank {first}" if first == last else f"ranks {first} ... {last}" for first, last in groups]
    return f", {shown[0]} unlike {shown[1]}" if shown else ""


def _shown(key: Agreed, bits: int) -> str:
    if key in _SHOWN_AS_FLOAT:
        value = float(np.int32(bits).view(np.float32))
        return f"{value:g}" if math.isfinite(value) else str(value)
    if key is Agreed.TABLE:
        return "with new parameters" if bits < 0 else f"no. {bits}"
    return str(bits)
