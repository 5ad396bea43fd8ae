"""Decisions on their way to the host, in order; what they lead to once they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from distscale.decision import Decision
from distscale.errors import ConfigError, ScaleExhaustedError
from distscale.policy import is_number
from distscale.record import StepReport

__all__ = ["ReportQueue"]


class ReportQueue:
    """Turns decisions into reports when their copy has arrived, hands them on, and stops a run that cannot go on.

    Args:
        on_step: called with each report, in order.
        max_consecutive_skips: see :class:`~distscale.DistributedGradScaler`.
    """

    def __init__(self, on_step: Callable[[StepReport], None] | None, max_consecutive_skips: int | None) -> None:
        if on_step is not None and not callable(on_step):
            raise ConfigError(f"on_step={on_step!r} is not allowed: it must be callable with a StepReport, or None")
        if max_consecutive_skips is not None and not (is_number(max_consecutive_skips) and max_consecutive_skips >= 1):
            raise ConfigError(f"max_consecutive_skips={max_consecutive_skips!r} is not allowed: at least 1, or None")
        self.last: StepReport | None = None
        self._on_step = on_step
        self._max_consecutive_skips = max_consecutive_skips
        self._waiting: deque[Decision] = deque()
        self._blocked_since: int | None = None

    def add(self, decision: Decision) -> None:
        self._waiting.append(decision)

    def forget(self) -> None:
        """Drops what is on the way and what was reported last."""
        self._waiting.clear()
        self.last, self._blocked_since = None, None

    def drain(self, keep: int = 0) -> None:
        """Reports all but the newest ``keep`` decisions. Syncs host: it waits for the copies of what it reports.

        Raises:
            DesyncError, ProtocolError: if the ranks could not decide.
            ScaleExhaustedError: if too many steps in a row were skipped and no lower scale can help.
        """
        while len(self._waiting) > keep:
            decision = self._waiting.popleft()
            decision.raise_if_broken()
            self.last = decision.report()
            if self._on_step is not None:
                self._on_step(self.last)
            self._raise_if_exhausted(self.last, decision.blocked_steps)

    def _raise_if_exhausted(self, report: StepReport, blocked_steps: int) -> None:
        if blocked_steps == 0:
            self._blocked_since = None
            return
        if self._blocked_since is None:
            self._blocked_since = report.step - blocked_steps + 1
        if self._max_consecutive_skips is None or blocked_steps < self._max_consecutive_skips:
            return
        if report.culprit is None and (not report.skipped or report.vetoed_by is not None):
            return  # another step of the same update was blocked, and has said so
        since = f"{blocked_steps} steps were skipped in a row, since step {self._blocked_since}"
        if report.culprit is None:
            raise ScaleExhaustedError(
                f"{since}, and the scale, {report.scale:g}, cannot go lower: gradients are not finite; of which tensor "
                "and rank is not known, for distscale did not look at them itself"
            )
        rank, tensor, kind = report.culprit.rank, report.culprit.tensor, report.culprit.kind
        if tensor == "loss":
            raise ScaleExhaustedError(
                f"the loss itself is not finite: {since}; last it was {kind} on rank {rank}. No loss scale can help; "
                "look at the data and the forward pass of that rank"
            )
        raise ScaleExhaustedError(
            f"{since}, and the scale, {report.scale:g}, cannot go lower: the gradient of {tensor} is {kind} on rank "
            f"{rank}, while the loss is finite. Look at that layer's backward pass, or allow a lower min_scale"
        )
