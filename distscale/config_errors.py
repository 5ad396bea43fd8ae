"""What is wrong with a configuration, said so that its writer can put it right."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["nearest_key", "sentence"]

ValidKeys = Mapping[str, Sequence[str]]


def sentence(error: Mapping[str, Any], valid: ValidKeys) -> str:
    """Puts one validation error into words.

    Args:
        error: an entry of pydantic's ``ValidationError.errors()``.
        valid: the keys of each section.
    """
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        kind = "key" if "." in key else "section"
        near = nearest_key(key, valid)
        known = valid[key.partition(".")[0]] if kind == "key" else valid
        return f"there is no {kind} {key}; " + (f"did you mean {near}?" if near else f"there are {', '.join(known)}")
    if error["type"] == "string_pattern_mismatch":
        return (
            f"{key} = {error['input']!r} cannot be used: write letters, digits, '.', '_' and '-', not '.' or '-' first"
        )
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):
        return f"{key.rpartition('.')[0]} = {error['input']!r} has too few values; add number {error['loc'][-1] + 1}"
    if error["type"] == "missing":
        return f"{key} is missing; add it"
    if error["type"] == "value_error":
        return (f"{key}: " if key else "") + str(error["ctx"]["error"])
    if error["type"].startswith("model_"):
        return f"{key} = {error['input']!r} cannot be used: {key} is a section with keys of its own"
    demand = str(error["msg"]).removeprefix("Input ")
    return f"{key} = {error['input']!r} cannot be used: it {demand[0].lower()}{demand[1:]}"


def nearest_key(key: str, valid: ValidKeys) -> str | None:
    """The valid section or dotted key that was probably meant by ``key``, if any is near.

    In this order: the same name in another section, a similar name in the same section, anything similar.
    """
    section, dot, name = key.partition(".")
    if not dot:
        elsewhere = [f"{place}.{key}" for place, names in valid.items() if key in names]
        return next(iter(elsewhere + difflib.get_close_matches(key, valid, 1)), None)
    elsewhere = [f"{place}.{name}" for place, names in valid.items() if name in names]
    similar = [
        f"{place}.{near}"
        for place in sorted(valid, key=lambda place: place != section)
        for near in difflib.get_close_matches(name, valid[place], 1)
    ]
    return next(iter(elsewhere + similar), None)
