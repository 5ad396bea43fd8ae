"""The parent's side: four ranks that live for many episodes, and the judge of what they saw."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from soak_episodes import Episode
from soak_ranks import Row, serve

from ranks import run_ranks

PLAY_S = 120.0
"""For one episode. Afterwards the ranks are given up."""
LIFE_S = 24 * 3600.0


class World:
    """Gloo processes that play one episode after another with one kind of scaler: "distscale" or "torch".

    They start with the first episode.
    After an error that not all ranks had together, the next episode begins with new processes: collectives may be
    pending.
    """

    def __init__(self, scaler_kind: str, num_ranks: int, group_timeout_s: float = 60.0) -> None:
        self.scaler_kind, self.num_ranks, self.group_timeout_s = scaler_kind, num_ranks, group_timeout_s
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None

    def play(self, episode: Episode) -> list[list[Row]]:
        """What every rank saw: by rank and step, up to its first error. A rank that hangs has one, too."""
        assert episode.kind.num_ranks == self.num_ranks
        if not self._connections:
            self._start()
        for connection in self._connections:
            connection.send(episode.to_json())
        by_rank: dict[int, list[Row]] = {}
        while len(by_rank) < self.num_ranks:
            left = {self._connections[rank]: rank for rank in range(self.num_ranks) if rank not in by_rank}
            has_failed = any(rows[-1].error for rows in by_rank.values())
            ready = wait(list(left), timeout=self.group_timeout_s + 5.0 if has_failed else PLAY_S)
            if not ready:
                by_rank |= {rank: [Row(error="did not come to an end")] for rank in left.values()}
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = left[connection]
                try:
                    by_rank[rank] = connection.recv()
                except EOFError:
                    by_rank[rank] = [Row(error=f"died: {self._end}")]
        seen = [by_rank[rank] for rank in range(self.num_ranks)]
        if len({(len(rows), bool(rows[-1].error)) for rows in seen}) > 1:
            self.close()
        return seen

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._connections and self._thread is not None:
            self._thread.join(5.0)
            for pid in self._pids if self._thread.is_alive() else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join()
        self._connections = []

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="soak-")
        address = str(Path(folder.name) / "parent")
        self._end = None

        def run() -> None:
            with folder:
                try:
                    run_ranks(
                        serve,
                        self.num_ranks,
                        address,
                        self.num_ranks,
                        self.scaler_kind,
                        self.group_timeout_s,
                        init=False,
                        timeout_s=LIFE_S,
                        group_timeout_s=self.group_timeout_s,
                    )
                except BaseException as error:
                    self._end = error
                    with suppress(OSError):
                        Client(address).close()  # wakes the parent, if it still waits for a rank

        with Listener(address) as listener:
            self._thread = threading.Thread(target=run, daemon=True)
            self._thread.start()
            by_rank: dict[int, Connection] = {}
            self._pids = []
            while len(by_rank) < self.num_ranks:
                connection = listener.accept()
                try:
                    rank, pid = connection.recv()
                except EOFError:
                    raise AssertionError("the ranks did not start") from self._end
                by_rank[rank] = connection
                self._pids.append(pid)
        self._connections = [by_rank[rank] for rank in range(self.num_ranks)]


# ---------------------------------------------------------------- what went wrong


@dataclass(frozen=True)
class Seen:
    """One step, on all ranks."""

    must_skip: bool
    is_split: bool
    """Some ranks took the step and others did not, or their scales or growth trackers differ."""
    is_poisoned: bool
    """Some rank took a step although a value was not finite somewhere, or its parameters are not finite now."""
    error: str

    @property
    def is_good(self) -> bool:
        return not (self.is_split or self.is_poisoned or self.error)


def look(rows: Sequence[Row]) -> Seen:
    """Pure."""
    error = next((row.error for row in rows if row.error), "")
    must_skip = any(row.sees_bad or row.loses or row.vetoes for row in rows)
    if error:
        return Seen(must_skip, False, False, error)
    took = {row.params_changed for row in rows if row.moved}
    states = {(row.scale, row.trackers) for row in rows}
    is_poisoned = any(row.params_bad or (must_skip and row.params_changed) for row in rows)
    return Seen(must_skip, len(took) > 1 or len(states) > 1, is_poisoned, "")


class Judge:
    """Knows what must come of every step of distscale, by the rule of the scale and by what was put in."""

    def __init__(self, episode: Episode) -> None:
        self.scale, self.run, self.num_blocked = episode.init_scale, 0, 0
        self.tolerance = 1  # the hysteresis, until the first overflow since the scale has grown
        self.growth_interval = episode.growth_interval
        self.overflows_by_itself = episode.kind.overflows_by_itself
        self.step = 0

    def faults_of(self, rows: Sequence[Row]) -> list[str]:
        """What is wrong with a step, in words."""
        seen = look(rows)
        if seen.error:
            return [f"rank {rank}: {row.error}" for rank, row in enumerate(rows) if row.error]
        has_put = any(row.has_put for row in rows)
        before = self.scale
        self._advance(rows)
        wrong = {
            "what was put in is not what is there": has_put != seen.must_skip
            and (has_put or not self.overflows_by_itself),
            "the ranks differ in scale or trackers": len({(row.scale, row.trackers) for row in rows}) > 1,
            "the ranks differ in their reports": len({(repr(row.report), repr(row.amax)) for row in rows}) > 1,
            "a skipped step changed parameters": seen.must_skip and any(row.params_changed for row in rows),
            "a skipped step changed the optimizer's state": seen.must_skip and any(row.state_changed for row in rows),
            "a clean step did not change the parameters of every rank and optimizer": not seen.must_skip
            and not all(moved for row in rows for moved in row.moved),
            "parameters are not finite": any(row.params_bad for row in rows),
            "replicas differ": self._differ(rows),
            f"the scale is not {self.scale}": any(row.scale != self.scale for row in rows),
            f"the trackers are not {self.trackers}": any(row.trackers != self.trackers for row in rows),
        }
        report = rows[0].report
        assert report is not None
        told = (report.step, report.skipped, report.scale, report.next_scale)
        wanted = (self.step - 1, seen.must_skip, before, self.scale)
        wrong[f"the report says {told}, and not {wanted}"] = told != wanted
        if not seen.must_skip:
            # Replicas count once.
            pieces = {key: measured for row in rows for key, *measured in row.pieces}
            peak = max((peak for peak, _ in pieces.values()), default=0.0)
            norm = math.sqrt(sum(square for _, square in pieces.values()))
            reported = max(report.amax.values(), default=0.0)
            wrong[f"the largest magnitude is {reported}, and not {peak}"] = reported != peak
            wrong[f"the norm is {report.grad_norm}, and not {norm}"] = report.grad_norm is not None and (
                not math.isclose(report.grad_norm, norm, rel_tol=1e-6)
            )
        culprits = {rank for rank, row in enumerate(rows) if row.loses} or {
            rank for rank, row in enumerate(rows) if row.sees_bad
        }
        culprit = report.culprit and report.culprit.rank
        wrong[f"the culprit is {culprit}, and not of {culprits}"] = (
            culprit not in culprits if culprits else culprit is not None
        )
        return [text for text, is_wrong in wrong.items() if is_wrong]

    @property
    def trackers(self) -> tuple[int, ...]:
        return self.run, self.tolerance, self.num_blocked, self.step

    def _advance(self, rows: Sequence[Row]) -> None:
        self.step += 1
        if any(row.loses for row in rows):
            self.run, self.num_blocked = 0, self.num_blocked + 1
        elif any(row.sees_bad for row in rows):
            self.scale, self.run, self.tolerance = self.scale / 2, 0, 0
        elif not any(row.vetoes for row in rows):
            self.run, self.num_blocked = self.run + 1, 0
            if self.run >= self.growth_interval:
                self.scale, self.run, self.tolerance = self.scale * 2, 0, 1

    @staticmethod
    def _differ(rows: Sequence[Row]) -> bool:
        checksums: dict[Any, int] = {}
        return any(checksums.setdefault(key, value) != value for row in rows for key, value in row.replicas)


def check(episode: Episode, by_rank: Sequence[Sequence[Row]]) -> None:
    """Raises AssertionError, which says what was wrong and how to play it again."""
    judge = Judge(episode)
    for step in range(max(len(rows) for rows in by_rank)):
        rows = [rows[step] if step < len(rows) else Row(error="ended before") for rows in by_rank]
        if faults := judge.faults_of(rows):
            lines = "\n".join(faults)
            shown = "\n".join(
                f"rank {rank}: {row._replace(replicas=(), pieces=(), amax=())}" for rank, row in enumerate(rows)
            )
            raise AssertionError(
                f"step {step} on {episode.layout!r}, seed {episode.seed}, faults {episode.steps[step]}:\n{lines}\n"
                f"{shown}\nto play it again:\n"
                f"DISTSCALE_SOAK_EPISODE='{episode.to_json()}' .venv/bin/python -m pytest tests/soak -k replay"
            )
