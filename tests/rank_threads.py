"""Ranks as threads of the test's own process, and a reducer that counts.

Import these from ``ranks``.
"""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distscale.errors import ProtocolError
from distscale.reducers import Reducer


class RanksError(Exception):
    """Some ranks failed: what each of them said, and what the others returned.

    Attributes:
        failures: by rank: its traceback, its exit code, or its stack when it ran out of time.
        results: by rank, of the ranks that returned.
    """

    def __init__(self, fn: Callable[..., Any], failures: Mapping[int, str], results: Mapping[int, Any]) -> None:
        self.failures = dict(failures)
        self.results = dict(results)
        parts = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(failures.items())]
        name = getattr(fn, "__qualname__", repr(fn))
        total = len(failures) + len(results)
        super().__init__("\n".join([f"{name}: {len(failures)} of {total} ranks failed", *parts]))


class ThreadRanks:
    """A world of ranks that are threads, with one reducer a rank.

    The reducers stay good between calls of :meth:`run`, so that scalers made with them can live over many calls.

    Args:
        world_size: number of ranks.
        timeout_s: for one call of :meth:`run`, and for one exchange.
    """

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.reducers = [ThreadReducer(self, rank, world_size) for rank in range(world_size)]
        self._changed = threading.Condition()
        self._round = 0
        self._items: dict[int, tuple[Any, Any]] = {}
        self._answer: Any = None
        self._is_spoiled = False
        self._gone: list[str] = []  # ranks that will come to no further exchange, and why

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``fn(reducer, *args)`` in one thread a rank and returns what they return, by rank.

        ``args`` are shared by the threads, not copied.

        Raises:
            RanksError: if any rank raised or ran out of time. A thread cannot be killed: one that hangs outside an
                exchange stays behind as a daemon, and this world is of no further use.
        """
        assert not self._is_spoiled, "a thread of an earlier run that ran out of time may still be here"
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}

        def rank_main(reducer: ThreadReducer) -> None:
            end = "has returned"
            try:
                results[reducer.rank] = fn(reducer, *args)
            except BaseException as error:  # every rank's end must be seen by its peers
                failures[reducer.rank] = traceback.format_exc()
                end = f"failed with {error!r}"
            self._leave(f"rank {reducer.rank} {end}")

        self._gone, self._items = [], {}
        threads = [
            threading.Thread(target=rank_main, args=(reducer,), name=f"rank-{reducer.rank}", daemon=True)
            for reducer in self.reducers
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            is_over = self._changed.wait_for(lambda: len(self._gone) == len(threads), self.timeout_s)
        if not is_over:
            failures |= self._give_up(threads, results, failures)
        for rank, thread in enumerate(threads):
            if rank in results or rank in failures:
                thread.join(self.timeout_s)
        if failures:
            raise RanksError(fn, failures, {rank: results[rank] for rank in results if rank not in failures})
        return [results[rank] for rank in range(len(threads))]

    def meet(self, rank: int, kind: Any, item: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Waits for all ranks and returns ``combine(items by rank)``, computed once.

        Args:
            kind: has to be the same on all ranks: what they came for.

        Raises:
            ProtocolError: if a rank came for something else, has returned, failed, or does not come in time.
        """
        with self._changed:
            mine = self._round
            self._items[rank] = (kind, item)
            if len(self._items) == len(self.reducers):
                came = [self._items[peer] for peer in range(len(self.reducers))]
                self._items = {}
                kinds = [kind for kind, _ in came]
                self._answer = (
                    combine([item for _, item in came])
                    if kinds.count(kinds[0]) == len(kinds)
                    else ProtocolError(f"the ranks came to different exchanges: {kinds}")
                )
                self._round += 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._round > mine or bool(self._gone), self.timeout_s)
            if self._round == mine:
                why = "; ".join(self._gone) or f"not all ranks came within {self.timeout_s:g} s"
                raise ProtocolError(f"rank {rank} is alone in its exchange: {why}")
            # The next answer needs every rank to come again, so this one is still ours.
            if isinstance(self._answer, ProtocolError):
                raise self._answer
            return self._answer

    def _leave(self, why: str) -> None:
        with self._changed:
            self._gone.append(why)
            self._changed.notify_all()

    def _give_up(
        self, threads: Sequence[threading.Thread], results: Mapping[int, Any], failures: Mapping[int, str]
    ) -> dict[int, str]:
        """Returns the stacks of the ranks that still run, and ends those that wait in an exchange."""
        frames = sys._current_frames()
        late = {}
        for rank, thread in enumerate(threads):
            frame = frames.get(thread.ident or 0)
            if rank not in results and rank not in failures:
                stack = "".join(traceback.format_stack(frame)) if frame else "no stack"
                late[rank] = f"still ran after {self.timeout_s:g} s; it was here:\n{stack}"
        self._is_spoiled = True
        self._leave("the time is over")
        return late


class ThreadReducer:
    """A rank's end of a :class:`ThreadRanks`: sums are added in rank order, so all ranks get the same bits."""

    def __init__(self, ranks: ThreadRanks, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._ranks = ranks

    def device(self, preferred: torch.device) -> torch.device:
        return preferred

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        kind = ("reduce", maxima.dtype, maxima.shape, None if sums is None else (sums.dtype, sums.shape))
        assert maxima.dtype is torch.int32
        assert sums is None or sums.dtype is torch.float64
        highest, total = self._ranks.meet(self.rank, kind, (maxima, sums), _combine)
        maxima.copy_(highest)
        if sums is not None:
            sums.copy_(total)

    def gather(self, item: Any) -> list[Any]:
        # Pickled, as between processes: each rank gets its own copies.
        copies = self._ranks.meet(self.rank, "gather", pickle.dumps(item), list)
        return [pickle.loads(copy) for copy in copies]


def _combine(vectors: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    highest = vectors[0][0].clone()
    total = None if vectors[0][1] is None else vectors[0][1].clone()
    for maxima, sums in vectors[1:]:
        torch.maximum(highest, maxima.to(highest.device), out=highest)
        if total is not None and sums is not None:
            total += sums.to(total.device)
    return highest, total


class CountingReducer:
    """Passes everything on to ``inner`` and counts it.

    Attributes:
        reduced_bytes: of each exchange, in order: bytes of both vectors.
        num_gathers: calls of ``gather``.
    """

    def __init__(self, inner: Reducer) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.reduced_bytes: list[int] = []
        self.num_gathers = 0

    @property
    def num_reduces(self) -> int:
        """Number of exchanges."""
        return len(self.reduced_bytes)

    def device(self, preferred: torch.device) -> torch.device:
        return self.inner.device(preferred)

    def reduce_(self, maxima: Tensor, sums: Tensor | None) -> None:
        self.reduced_bytes.append(maxima.nbytes + (0 if sums is None else sums.nbytes))
        self.inner.reduce_(maxima, sums)

    def gather(self, item: Any) -> list[Any]:
        self.num_gathers += 1
        return self.inner.gather(item)


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Runs ``fn(reducer, *args)`` on threads; see :meth:`ThreadRanks.run`."""
    return ThreadRanks(world_size, timeout_s).run(fn, *args)
