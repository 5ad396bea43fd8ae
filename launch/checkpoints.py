"""The folder of a run and the checkpoints in it. A checkpoint is there completely, or it is not there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

__all__ = ["checkpoints_of", "load_checkpoint", "move_aside", "save_checkpoint"]

_COMPLETE = re.compile(r"step_(\d+)")


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Returns the complete checkpoints of a run by step, oldest first."""
    found = {}
    for path in (folder / "checkpoints").glob("step_*"):
        name = _COMPLETE.fullmatch(path.name)
        # The metadata is what torch writes last, once all ranks have written their parts.
        if name and (path / ".metadata").is_file():
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Writes ``state`` aside, names it once every rank has finished, and removes all but the newest ``keep``.

    Collective: yes. All ranks must see the same file system.
    """
    final = folder / "checkpoints" / f"step_{step}"
    aside = final.with_name(f"partial_{step}")
    _on_rank_0(lambda: shutil.rmtree(aside, ignore_errors=True))
    dcp.save(state, checkpoint_id=aside)

    def publish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for old in list(checkpoints_of(folder).values())[:-keep]:
            shutil.rmtree(old)

    _on_rank_0(publish)


def load_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Fills ``state``, whose tensors say what this rank holds, in place. Collective: yes."""
    dcp.load(state, checkpoint_id=path)


def move_aside(folder: Path) -> Path | None:
    """Renames an earlier run to the first free ``<name>.1``, ``<name>.2``, ...; returns that, or None."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)


def _on_rank_0(action: Callable[[], object]) -> None:
    """Runs ``action`` on rank 0 after all ranks have come here, before any goes on; an error reaches all."""
    dist.barrier()
    error: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as failure:
            error = [f"{failure.strerror}: {failure.filename}"]
    dist.broadcast_object_list(error)
    if error[0]:
        raise OSError(f"the checkpoint could not be written: {error[0]}")
