"""Where tables go."""

from __future__ import annotations

from rich.console import Console

__all__ = ["console"]


def console(*, stderr: bool = False) -> Console:
    """A terminal of its own width; a file or a pipe gets 120 columns."""
    there = Console(stderr=stderr)
    return there if there.is_terminal else Console(stderr=stderr, width=120)
