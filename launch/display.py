"""What a run shows while it trains: a progress bar on a terminal, else a line every so many steps."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from steps import Trained

__all__ = ["Display", "power_of_two"]

SMOOTHING = 0.9


def power_of_two(scale: float) -> str:
    """A scale for people: "2^17" if it is a power of two, else its digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


class Display:
    """Shows the steps of one run; used as a context manager. Does nothing on ranks other than 0.

    Args:
        console: to print on, None to show nothing.
        title: of the run.
        num_steps: of the whole run.
        first_step: where it starts.
        num_skips: before that.
        tokens_per_step: over all ranks.
        log_every: steps between lines without a terminal.
    """

    def __init__(
        self,
        console: Console | None,
        title: str,
        num_steps: int,
        first_step: int,
        num_skips: int,
        tokens_per_step: int,
        log_every: int,
    ) -> None:
        self._console = console
        self._title = title
        self._num_steps = num_steps
        self._tokens_per_step = tokens_per_step
        self._log_every = log_every
        self._num_skips = num_skips
        self._tokens_per_s = 0.0
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            # Fits into 80 columns.
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(10),
                TextColumn("{task.completed}/{task.total} {task.fields[state]}", table_column=Column(no_wrap=True)),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=num_steps, completed=first_step, state="")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, sentence: str) -> None:
        """Prints a line above the bar."""
        if self._console is not None:
            self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def show(self, trained: Trained) -> None:
        """Shows one step, and says why if it was skipped."""
        report, extra = trained.report, trained.extra
        now = self._tokens_per_step / extra["time_s"]
        self._tokens_per_s = SMOOTHING * self._tokens_per_s + (1 - SMOOTHING) * now if self._tokens_per_s else now
        self._num_skips += report.skipped
        if report.skipped:
            why = f"vetoed by rank {report.vetoed_by}" if report.vetoed_by is not None else "for an unknown reason"
            if report.culprit:
                why = f"{report.culprit.kind} in {report.culprit.tensor} on rank {report.culprit.rank}"
            self.say(
                f"step {report.step}: skipped, {why} at scale {power_of_two(report.scale)}; "
                f"the scale is now {power_of_two(report.next_scale)}"
            )
        state = (
            f"loss {extra['loss']:.3f}  scale {power_of_two(report.next_scale)}  skips {self._num_skips}  "
            f"{self._tokens_per_s:,.0f} tokens/s"
        )
        done = report.step + 1
        if self._bar:
            self._bar.update(self._task, completed=done, state=state)
        elif done % self._log_every == 0 or done == self._num_steps:
            self.say(f"{self._title}: step {done}/{self._num_steps}  {state}")
