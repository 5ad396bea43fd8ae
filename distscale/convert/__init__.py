"""Converts the part of a configuration that is about precision and loss scale from one trainer's form to another's.

A format is a module with four functions: ``find(text, where)`` gives the part of a text that is of this format, or
None; ``read(values, where)`` makes a :class:`ScalingRule` of it; ``hold(rule)`` is the nearest rule that the format can
express; and ``render(rule)`` writes down such a one, so that reading it gives the same rule again. What ``hold``
changes is told, with the reason in the module's ``REASONS``. Nothing is executed, and no file is touched here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from distscale.convert import accelerate, colossalai, deepspeed, megatron, nemo, nemo2, toml, transformers
from distscale.convert.rule import Reading, ScalingRule, differences
from distscale.errors import ConfigError

__all__ = ["FORMATS", "Converted", "Format", "convert", "recognize"]


class Format(Protocol):
    """What each module of a format has."""

    @property
    def REASONS(self) -> Mapping[str, str]:
        """By field of the rule, why ``hold`` changes it."""

    def find(self, text: str, where: str) -> Mapping[str, Any] | None:
        """The part of ``text`` that is of this format, by key; None if it is of another."""

    def read(self, values: Mapping[str, Any], where: str) -> Reading:
        """The rule, and what the source leaves open. Raises ConfigError for values that cannot be meant."""

    def hold(self, rule: ScalingRule) -> ScalingRule:
        """The nearest rule that the format can express."""

    def render(self, rule: ScalingRule) -> str:
        """Text for a rule that ``hold`` returned."""


FORMATS: Mapping[str, Format] = {
    "toml": toml,
    "deepspeed": deepspeed,
    "megatron": megatron,
    "nemo": nemo,
    "nemo2": nemo2,
    "colossalai": colossalai,
    "accelerate": accelerate,
    "transformers": transformers,
}


class Converted(NamedTuple):
    """The result of :func:`convert`."""

    text: str
    source: str
    """The format that was read."""
    notes: list[str]
    """What the source leaves open, and what the target cannot hold."""


def recognize(text: str, where: str) -> str:
    """The only format that ``text`` can be of.

    Raises:
        ConfigError: if there is none, or more than one.
    """
    found = [name for name, module in FORMATS.items() if module.find(text, where) is not None]
    if len(found) == 1:
        return found[0]
    may_be = f"it may be {' or '.join(found)}" if found else "it has no key of any known format"
    raise ConfigError(f"{where}: the format cannot be told, {may_be}; say --from, one of {', '.join(FORMATS)}")


def convert(text: str, target: str, source: str | None = None, where: str = "the text") -> Converted:
    """Reads ``text`` and writes it in another format.

    Args:
        text: of the configuration: a whole file, or the part about precision.
        target: one of :data:`FORMATS`.
        source: one of them, too; None: :func:`recognize` tells.
        where: the name of the file, for errors.

    Raises:
        ConfigError: naming the file, the key and what is allowed.
    """
    source = source or recognize(text, where)
    values = FORMATS[source].find(text, where)
    if values is None:
        raise ConfigError(f"{where}: there is no key of {source} in it; --from is one of {', '.join(FORMATS)}")
    rule, notes = FORMATS[source].read(values, where)
    held = FORMATS[target].hold(rule)
    notes = [*notes, *differences(rule, held, target, FORMATS[target].REASONS)]
    return Converted(FORMATS[target].render(held) + "\n", source, notes)
