"""The folder of a run and the checkpoints in it. A checkpoint is there completely, or it is not there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from files import checksum, sync, write_whole

__all__ = [
    "Contents",
    "checkpoints_of",
    "clear_partial",
    "damage",
    "move_aside",
    "on_rank_0",
    "partial_path",
    "publish",
    "read_back",
    "save_checkpoint",
    "spoilt_file",
    "why_not_written",
]

_NAME = re.compile(r"step_(\d+)")
_MANIFEST = "manifest.json"

Contents = Mapping[str, tuple[int, int]]
"""The size and the CRC-32 of each file of a checkpoint, by name; what the manifest says."""


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
        contents = _manifest(path)
        if not contents:
            return f"{_MANIFEST} is empty"
        for name, (size, _) in contents.items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} of {size} bytes"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read: {error.strerror}"
    except (ValueError, AttributeError, TypeError):
        return f"{_MANIFEST} is no list of files"
    return None


def spoilt_file(path: Path, rank: int, world_size: int) -> str | None:
    """Says which file of a whole checkpoint has other bytes than when it was written; None if all are the same.

    Collective: no. Each rank reads its share of the files.
    """
    contents = _manifest(path)
    for name in sorted(contents)[rank::world_size]:
        try:
            if checksum(path / name) != contents[name][1]:
                return f"{name} has other bytes than were written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def read_back(aside: Path, group: dist.ProcessGroup | None = None) -> Contents:
    """Returns what the files of a written checkpoint hold; each rank reads its share. Collective: yes.

    Raises:
        OSError: on all ranks, if one cannot read its share.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    dist.barrier(group)
    # Other nodes may see a new file late in the folder, but not by its name.
    names = [sorted(file.name for file in aside.iterdir())] if rank == 0 else [[]]
    dist.broadcast_object_list(names, 0, group)
    own: dict[str, tuple[int, int]] | str = {}
    try:
        own = {name: ((aside / name).stat().st_size, checksum(aside / name)) for name in names[0][rank::world_size]}
    except OSError as error:
        own = f"rank {rank}: {_in_words(error)}"
    of_ranks: list[dict[str, tuple[int, int]] | str] = [""] * world_size
    dist.all_gather_object(of_ranks, own, group)
    contents: dict[str, tuple[int, int]] = {}
    for share in of_ranks:
        if isinstance(share, str):
            raise OSError(share)
        contents |= share
    return contents


def save_checkpoint(folder: Path, step: int, keep: int, write: Callable[[Path], object]) -> None:
    """Has a checkpoint written aside, names it once every rank has finished, and removes all but the newest.

    Collective: yes. All ranks must see the same file system.

    Args:
        folder: of the run.
        step: of the checkpoint.
        keep: how many checkpoints stay.
        write: called on all ranks with the folder to write files to, without folders in it.

    Raises:
        OSError: on all ranks, if the checkpoint cannot be named.
    """
    on_rank_0(lambda: clear_partial(folder))
    aside = partial_path(folder, step)
    write(aside)
    try:
        contents = read_back(aside)
        on_rank_0(lambda: publish(folder, step, keep, contents))
    except OSError as error:
        raise why_not_written(aside, str(error)) from None


def partial_path(folder: Path, step: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return folder / "checkpoints" / f"partial_{step}"


def clear_partial(folder: Path) -> None:
    """Removes what crashes have left of checkpoints that were being written."""
    for path in (folder / "checkpoints").glob("partial_*"):
        shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, step: int, keep: int, contents: Contents) -> Path:
    """Brings a written checkpoint to the disk, names it, and removes all older whole ones but the newest.

    Collective: no. One of a later step, which was damaged or the run had not gone back, does not count, and stays.

    Args:
        folder: of the run.
        step: of the checkpoint.
        keep: how many checkpoints stay, this one included.
        contents: of its files.

    Raises:
        OSError: if the disk does not take it; the older ones are then still there.
    """
    aside, final = partial_path(folder, step), folder / "checkpoints" / f"step_{step}"
    for name in contents:
        sync(aside / name)
    # Last, so that it stands for the other files.
    write_whole(aside / _MANIFEST, json.dumps(contents, indent=2))
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    sync(final.parent)
    whole = [path for number, path in checkpoints_of(folder).items() if number <= step and not damage(path)]
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
            error = [_in_words(failure)]
    dist.broadcast_object_list(error)
    if error[0]:
        raise OSError(error[0])


def why_not_written(aside: Path, why: str) -> OSError:
    """Returns the error for a checkpoint that could not be written, with the room that is left for it."""
    # What writes tensors says nothing of a full disk but that it is at another place of the file than it should be.
    free = shutil.disk_usage(aside.parents[1]).free
    return OSError(f"the checkpoint {aside} could not be written, with {free / 1e6:,.1f} MB free there: {why}")


def _manifest(path: Path) -> Contents:
    contents: Contents = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    return contents


def _in_words(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else str(error)
