"""The checkpoints of one trainer, written by torch.distributed.checkpoint: at once, or while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpoints import Contents, clear_partial, on_rank_0, partial_path, publish, read_back, why_not_written
from distscale.config import Config
from distscale.injector import Injector

__all__ = ["Saver"]


class Saver:
    """Writes checkpoints, one at a time. A failure to write one reaches all ranks at the same step.

    Args:
        config: of the run. With ``train.checkpoint_async`` a thread writes a copy of the state, made at once.
        injector: of faults; None for none.
    """

    def __init__(self, config: Config, injector: Injector | None = None) -> None:
        self._folder = config.folder
        self._keep = config.train.keep
        self._is_async = config.train.checkpoint_async
        self._timeout = timedelta(seconds=config.parallel.timeout_s)
        self._injector = injector
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None
        self._aside = partial_path(config.folder, 0)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint, or starts to, once the one before is complete. Collective: yes. Syncs host: yes.

        Raises:
            OSError: on all ranks, if this checkpoint or the one before cannot be written.
        """
        self.finish()
        on_rank_0(lambda: clear_partial(self._folder))
        aside = self._aside = partial_path(self._folder, step)
        writer = self._injector.writer(aside, step) if self._injector else dcp.FileSystemWriter(aside)
        if not self._is_async:
            try:
                dcp.save(state, storage_writer=writer)
                contents = read_back(aside)
                on_rank_0(lambda: self._publish(step, contents))
            except (CheckpointException, OSError) as error:
                raise self._given_up(_why(error)) from None
            return
        # The thread communicates while the main thread does: in one group their messages would be mixed up.
        self._group = self._group or dist.new_group(backend="gloo", timeout=self._timeout)
        written = dcp.async_save(state, storage_writer=writer, process_group=self._group)

        def complete() -> None:
            contents = read_back(aside, self._group)
            if dist.get_rank() == 0:
                self._publish(step, contents)

        self._pending = _followed_by(written, complete)

    def finish(self) -> None:
        """Waits until the last checkpoint is complete. Collective: yes.

        Raises:
            OSError: on all ranks, if it could not be written; the older ones are still there.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        why = None
        try:
            pending.result()
        except (CheckpointException, OSError) as error:
            why = _why(error)
        of_ranks: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, why, self._group)
        if any(of_ranks):
            raise self._given_up(next(filter(None, of_ranks)))

    def _given_up(self, why: str) -> OSError:
        """Returns the error for a checkpoint that no rank writes any more, and makes room. Collective: yes."""
        error = why_not_written(self._aside, why)
        on_rank_0(lambda: clear_partial(self._folder))
        return error

    def _publish(self, step: int, contents: Contents) -> None:
        final = publish(self._folder, step, self._keep, contents)
        if self._injector:
            self._injector.after_checkpoint(final, step)


def _followed_by(first: Future[Any], action: Callable[[], object]) -> Future[None]:
    """Runs ``action`` in the thread of ``first`` when that has ended well; done when both are.

    (The result of a future itself is there before its callbacks have run.)
    """
    both: Future[None] = Future()

    def go_on(first: Future[Any]) -> None:
        try:
            first.result()
            action()
        except BaseException as error:  # CheckpointException is no Exception
            both.set_exception(error)
        else:
            both.set_result(None)

    first.add_done_callback(go_on)
    return both


def _why(error: CheckpointException | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in sorted(error.failures.items()))
