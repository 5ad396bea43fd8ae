"""SLURM's short forms of many nodes, expanded without asking SLURM."""

from __future__ import annotations

import itertools
import re

from distscale.errors import ConfigError

__all__ = ["expand_nodelist", "tasks_of_node"]

_ENTRY = re.compile(r"(?:[^\[\],]|\[[^\[\]]+\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_MAX_RANGE = 2**18  # hostlist.h: SLURM makes none that is longer


def expand_nodelist(nodelist: str) -> list[str]:
    """Returns the host names, in order: ``gpu[08-10,12],login`` is gpu08, gpu09, gpu10, gpu12, login.

    Several brackets in a name are all combined, the last one fastest, as ``scontrol show hostnames`` does.

    Raises:
        ConfigError: if it is not of this form.
    """
    entries = _ENTRY.findall(nodelist)
    if not entries or ",".join(entries) != nodelist:
        raise ConfigError(f"the list of nodes {nodelist!r} is not of SLURM's form, such as gpu[08-10,12],login")
    names = []
    for entry in entries:
        # Every second piece stood in brackets.
        pieces = re.split(r"\[([^\]]+)\]", entry)
        choices = [_members(piece, nodelist) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def tasks_of_node(counts: str, node: int) -> int:
    """Returns the number of tasks on a node from SLURM's list of all: ``2(x3),1`` is 2 on the first three, then 1.

    Raises:
        ConfigError: if it is not of this form, or too short.
    """
    first = 0
    for entry in counts.split(","):
        match = _COUNT.fullmatch(entry)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={counts} is not of SLURM's form, such as 2(x3),1")
        first += int(match[2] or 1)
        if node < first:
            return int(match[1])
    raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={counts} lists {first} nodes, so this is none: SLURM_NODEID={node}")


def _members(inside: str, nodelist: str) -> list[str]:
    """Returns what stands in brackets one by one; leading zeros are kept."""
    members = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < _MAX_RANGE:
            raise ConfigError(f"[{inside}] in the list of nodes {nodelist!r} is no list of numbers and rising ranges")
        members += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return members
