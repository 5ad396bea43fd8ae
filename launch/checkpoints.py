"""The folder of a run and the checkpoints in it. A checkpoint is there completely, or it is not there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

__all__ = [
    "checkpoints_of",
    "clear_partial",
    "damage",
    "move_aside",
    "on_rank_0",
    "partial_path",
    "publish",
    "save_checkpoint",
]

_NAME = re.compile(r"step_(\d+)")
_MANIFEST = "manifest.json"


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints of a run by step, oldest first, whole or damaged."""
    found = {}
    for path in (folder / "checkpoints").glob("step_*"):
        if name := _NAME.fullmatch(path.name):
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def damage(path: Path) -> str | None:
    """Says which file of a checkpoint is missing or has another size than when it was written; None if it is whole."""
    try:
        sizes = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, size in sizes.items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} of {size} bytes"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read: {error.strerror}"
    except (ValueError, AttributeError):
        return f"{_MANIFEST} is no list of files"
    return None


def save_checkpoint(folder: Path, step: int, keep: int, write: Callable[[Path], object]) -> None:
    """Has a checkpoint written aside, names it once every rank has finished, and removes all but the newest.

    Collective: yes. All ranks must see the same file system.

    Args:
        folder: of the run.
        step: of the checkpoint.
        keep: how many checkpoints stay.
        write: called on all ranks with the folder to write files to, without folders in it.
    """
    on_rank_0(lambda: clear_partial(folder))
    write(partial_path(folder, step))
    on_rank_0(lambda: publish(folder, step, keep))


def partial_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder / "checkpoints" / f"partial_{step}"


def clear_partial(folder: Path) -> None:
    """Removes what crashes have left of checkpoints that were being written."""
    for path in (folder / "checkpoints").glob("partial_*"):
        shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, step: int, keep: int) -> Path:
    """Brings a written checkpoint to the disk, names it, and removes all whole ones but the newest. Collective: no.

    Raises:
        OSError: if the disk does not take it; the older ones are then still there.
    """
    aside, final = partial_path(folder, step), folder / "checkpoints" / f"step_{step}"
    files = sorted(aside.iterdir())
    for file in files:
        _sync(file)
    # Last, so that it stands for the other files.
    sizes = {file.name: file.stat().st_size for file in files}
    with (aside / _MANIFEST).open("w", encoding="utf-8") as manifest:
        json.dump(sizes, manifest, indent=2)
        manifest.flush()
        os.fsync(manifest.fileno())
    _sync(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _sync(final.parent)
    whole = [path for path in checkpoints_of(folder).values() if not damage(path)]
    for old in whole[:-keep]:
        shutil.rmtree(old)
    return final


def move_aside(folder: Path) -> Path | None:
    """Renames an earlier run to the first free ``<name>.1``, ``<name>.2``, ...; returns that, or None."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def on_rank_0(action: Callable[[], object]) -> None:
    """Runs ``action`` on rank 0 after all ranks have come here, before any goes on. Collective: yes.

    Raises:
        OSError: on all ranks, if ``action`` raises one.
    """
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
