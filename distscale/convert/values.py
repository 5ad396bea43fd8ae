"""Takes checked values out of a mapping; every mistake names the file, the key and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from distscale.errors import ConfigError
from distscale.policy import MAX_COUNT, MAX_SCALE, MIN_SCALE, is_number

__all__ = ["Expression", "Keys", "not_looked_at"]

Meaning = TypeVar("Meaning")
SCALE = "a number between 2^-126 and 2^126"


class Expression(str):
    """A value that is not a plain number or word, but code or a variable: its text."""


class Keys:
    """The keys of one section.

    Args:
        values: by key.
        where: the file, as errors name it.
        section: stands before the keys in errors, such as ``fp16.``.
    """

    def __init__(self, values: object, where: str, section: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{where}: {section.rstrip('.')} = {values!r} cannot be used: it must be a section of keys"
            )
        self._values: Mapping[str, Any] = values
        self._where = where
        self._section = section

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def is_auto(self, key: str) -> bool:
        """Whether it is ``"auto"``, which Transformers and Accelerate fill in."""
        return bool(self._values.get(key) == "auto")

    def refuse_unknown(self, known: Sequence[str]) -> None:
        """Raises for a key that is not in ``known``, with the nearest one."""
        for key in self._values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {self._section}{near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{self._where}: there is no key {self._section}{key}; {hint}")

    def fail(self, key: str, demand: str) -> ConfigError:
        """The error for ``key``: it must be ``demand``."""
        value = self._values[key]
        what = f"the expression {value}" if isinstance(value, Expression) else repr(value)
        return ConfigError(f"{self._where}: {self._section}{key} = {what} cannot be used: it must be {demand}")

    def number(self, key: str, default: float, is_allowed: Callable[[float], bool], demand: str) -> float:
        """A finite or infinite number, also one written as text."""
        value = self._values.get(key, default)
        if isinstance(value, str) and not isinstance(value, Expression):
            try:
                value = float(value)
            except ValueError:
                raise self.fail(key, demand) from None
        if not is_number(value) or math.isnan(value) or not is_allowed(value):
            raise self.fail(key, demand)
        try:
            return float(value)
        except OverflowError:
            raise self.fail(key, demand) from None

    def scale(self, key: str, default: float) -> float:
        """A loss scale that fp32 holds together with its reciprocal."""
        return self.number(key, default, lambda x: MIN_SCALE <= x <= MAX_SCALE, SCALE)

    def floor(self, key: str, default: float | None) -> float | None:
        """None is none, as is all that cannot be reached: 0, and what lies below fp32's normal numbers."""
        value = self._bound(key, default)
        return value if value > MIN_SCALE else None

    def cap(self, key: str, default: float | None) -> float | None:
        """None and 0 are none, as is what lies above the largest scale whose reciprocal is a normal number."""
        value = self._bound(key, default)
        return value if 0 < value < MAX_SCALE else None

    def _bound(self, key: str, default: float | None) -> float:
        if self._values.get(key, default) is None:
            return 0.0
        return self.number(key, default or 0.0, lambda x: x >= 0, "a number of at least 0 (0: none)")

    def growth(self, key: str, default: float) -> float:
        """A factor that makes the scale grow."""
        return self.number(key, default, lambda x: 1 < x < math.inf, "a finite number above 1")

    def backoff(self, key: str, default: float) -> float:
        """A factor that makes it shrink."""
        return self.number(key, default, lambda x: 0 < x < 1, "a number between 0 and 1, exclusive")

    def count(self, key: str, default: int, low: int = 1, high: int = MAX_COUNT) -> int:
        """A whole number, also one written as a float."""
        demand = f"a whole number from {low} to {high}"
        return int(self.number(key, default, lambda x: low <= x <= high and x == int(x), demand))

    def norm(self, key: str, default: float | None) -> float | None:
        """The norm that gradients are clipped to; 0 and None are no clipping if they are written."""
        if key in self._values and self._values[key] is None:
            return 0.0
        if self._values.get(key, default) is None:
            return None
        return self.number(key, default or 0.0, lambda x: x >= 0, "a number of at least 0 (0: no clipping)")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def choice(self, key: str, default: str, meanings: Mapping[str, Meaning]) -> Meaning:
        """The meaning of a word."""
        value = self._values.get(key, default)
        if isinstance(value, Expression) or str(value) not in meanings:
            raise self.fail(key, f"one of {', '.join(meanings)}")
        return meanings[str(value)]

    def check_order(self, init: str, low: str, high: str, start: float, floor: float | None, cap: float | None) -> None:
        """Raises if the start does not lie between floor and cap; the first three are their keys."""
        if floor is not None and floor > start:
            raise ConfigError(
                f"{self._where}: {self._section}{low} gives {floor:g}, above the start {start:g} of {init}"
            )
        if cap is not None and cap < start:
            raise ConfigError(
                f"{self._where}: {self._section}{high} gives {cap:g}, below the start {start:g} of {init}"
            )


def not_looked_at(names: Iterable[object], shown: int = 12) -> list[str]:
    """A note that lists what lies outside precision and scale, in the order of the file."""
    texts = list(dict.fromkeys(map(str, names)))  # YAML has keys that are numbers
    if not texts:
        return []
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return [f"not looked at: {', '.join(texts[:shown])}{more}"]
