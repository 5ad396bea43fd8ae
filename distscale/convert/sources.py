"""From text to plain mappings: JSON, YAML, TOML, Python calls and command-line arguments. Nothing is executed."""

from __future__ import annotations

import ast
import importlib
import itertools
import operator
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from distscale.convert.values import Expression
from distscale.errors import ConfigError
from distscale.lenient_json import parse_json

__all__ = ["Call", "arguments", "calls", "keyword_arguments", "mapping", "toml"]


class Call(NamedTuple):
    """A call in Python source."""

    name: str
    """The last part of what is called."""
    line: int
    values: Mapping[str, Any]
    """The keyword arguments; what is not a literal is an :class:`Expression`."""
    positional: bool
    """Whether it has others, besides words such as ``"cuda"``."""


def mapping(text: str, where: str) -> Mapping[str, Any] | None:
    """Reads JSON, or YAML if PyYAML is installed; None if it is neither, or no mapping.

    Raises:
        ConfigError: for text that starts as JSON and is not; for what may be YAML, without PyYAML.
    """
    if text.lstrip().startswith("{"):
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not valid JSON: {error}") from None
        return values if isinstance(values, Mapping) else None
    if calls(text) or not re.search(r"^[\w\"'-]+:(\s|$)", text, re.MULTILINE):
        return None
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise ConfigError(f"{where} looks like YAML, which needs PyYAML: pip install PyYAML") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return None
    return values if isinstance(values, Mapping) else None


def toml(text: str) -> Mapping[str, Any] | None:
    """Reads TOML; None if it is something else."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def keyword_arguments(
    text: str, where: str, names: Collection[str], keywords: Collection[str]
) -> Mapping[str, Any] | None:
    """The keyword arguments of the only call of one of ``names``, or with one of ``keywords``.

    Raises:
        ConfigError: if there are several such calls.
    """
    found = [call for call in calls(text) if call.name in names or set(call.values) & set(keywords)]
    if len(found) > 1:
        lines = " and ".join(f"{call.name} in line {call.line}" for call in found)
        raise ConfigError(f"{where}: there are several: {lines}; give one of them in a file of its own")
    if found and found[0].positional:
        raise ConfigError(
            f"{where}: line {found[0].line} gives {found[0].name} numbers by position; name its arguments"
        )
    return found[0].values if found else None


def calls(text: str) -> list[Call]:
    """All calls in Python source, in its order; none if it is something else."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [
        Call(
            name=_name(node.func),
            line=node.lineno,
            values={word.arg or f"**{ast.unparse(word.value)}": _value(word.value) for word in node.keywords},
            positional=not all(isinstance(_value(argument), str) for argument in node.args),
        )
        for node in found
    ]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


_OPERATORS = {ast.Pow: operator.pow, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.LShift: operator.lshift}


def _value(node: ast.expr) -> Any:
    """A literal, or arithmetic such as ``2**16``."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        # Small operands only: the text of a stranger must not make us compute for hours.
        if all(isinstance(side, int | float) and abs(side) <= 2**32 for side in (left, right)) and abs(right) <= 1024:
            try:
                return _OPERATORS[type(node.op)](left, right)
            except (ArithmeticError, TypeError, ValueError):
                pass
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


def arguments(text: str, flags: Collection[str]) -> dict[str, Any]:
    """Reads ``--name value`` and ``--name=value`` out of command lines or a shell script.

    Quotes, arrays and line continuations are looked through, comments left out. A name without a value is True, as is
    one of ``flags``; of several the last one counts, as in argparse.
    """
    text = re.sub(r"(^|\s)#.*$", "", text, flags=re.MULTILINE)
    words = re.sub(r"[\\\"'(),\[\]]", " ", text).split()
    found: dict[str, Any] = {}
    for word, following in itertools.pairwise([*words, "--"]):
        if not re.match(r"--[A-Za-z]", word):
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and name not in flags and not following.startswith("--"):
            value = following
        found[name] = (Expression(value) if "$" in value else value) if value else True
    return found
