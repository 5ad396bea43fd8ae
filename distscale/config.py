"""The configuration of a pretraining run: a TOML file in, the checked :mod:`~distscale.sections` out.

Every mistake is a :class:`~distscale.ConfigError` that names the file, the key and what to write instead.
Needs the extra ``train`` (pydantic and tomli-w).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from distscale.config_errors import sentence
from distscale.errors import ConfigError

try:
    import tomli_w
    from pydantic import ValidationError

    from distscale.sections import Config, Section
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"distscale.config needs {missing.name}, which is not installed: pip install 'distscale[train]'"
    ) from missing

__all__ = ["Config", "changed_keys", "dump_config", "flatten", "load_config"]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file.

    Args:
        path: of the file.
        overrides: ``section.key=value`` each, the value in TOML; a bare word is a string, and nothing at all takes
            the key out. Applied in order.

    Raises:
        ConfigError: if the file is missing or not TOML; for keys or values that cannot be used, naming all.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"the config {path} does not exist; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} is not valid TOML: {error}") from None
    for override in overrides:
        _override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        sentences = [sentence(dict(item), _valid_keys()) for item in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{path}: {sentence}" for sentence in sentences)) from None


def dump_config(config: Config) -> str:
    """Returns ``config`` as TOML, every default written out; :func:`load_config` reads it back equal."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def flatten(config: Config) -> dict[str, Any]:
    """Returns the values by dotted key."""
    return dict(_leaves(config.model_dump()))


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Returns, by dotted key, the old and the new value of every setting that differs."""
    before, after = flatten(old), flatten(new)
    return {key: (before[key], after[key]) for key in after if before[key] != after[key]}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and section and dot and name) or "\n" in override:
        raise ConfigError(f"--set {override!r} is not of the form section.key=value, such as train.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"--set {override!r}: {section} is not a section of the config")
    if text.strip():
        table[name] = value
    else:
        table.pop(name, None)


def _valid_keys() -> dict[str, list[str]]:
    """The keys of each section."""
    sections = {name: info.annotation for name, info in Config.model_fields.items()}
    return {name: list(section.model_fields) for name, section in sections.items() if _is_section(section)}


def _is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)
