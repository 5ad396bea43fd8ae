"""What a resumed run starts from, decided before any process group: settings, text and checkpoint must go together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import checkpoints_of, damage
from data import Text
from distscale import ConfigError
from distscale.config import Config, changed_keys, load_config
from engine_config import changed_engine_keys

__all__ = ["ENGINE_FILE", "ResumePoint", "can_resume", "describe", "resume_point"]

ENGINE_FILE = "deepspeed.json"
"""Where a run with ``--deepspeed`` keeps that config."""

# What says when to look and what to keep, and where; everything else would make another run of it.
FREE_KEYS = frozenset(
    {
        "run.name",
        "run.out",
        "run.steps",
        "data.path",
        "train.eval_every",
        "train.eval_batches",
        "train.checkpoint_every",
        "train.checkpoint_async",
        "train.keep",
        "train.profile_every",
        "train.log_every",
        "parallel.timeout_s",
        "faults.inject",
    }
)


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on."""

    path: Path
    """The newest checkpoint that is whole."""
    step: int
    """Of it."""
    notes: tuple[str, ...]
    """Sentences on what differs from the run so far, and on damaged checkpoints."""


def describe(text: Text) -> str:
    """Returns JSON that tells texts apart, kept beside the settings of a run."""
    identity = {"tokens": len(text.train) + len(text.validation), "vocabulary": text.vocabulary}
    return json.dumps(identity | {"checksum": text.checksum}) + "\n"


def can_resume(folder: Path) -> bool:
    """Whether there is a checkpoint that is whole."""
    return not all(damage(path) for path in checkpoints_of(folder).values())


def resume_point(
    config: Config,
    text: Text,
    has_more: bool,
    engine: Mapping[str, Any] | None = None,
    spoilt: Mapping[Path, str] | None = None,
) -> ResumePoint:
    """Finds where to go on.

    Args:
        config: of this call.
        text: of this call.
        has_more: whether there is something to do even if no step is left: a comparison, or a verdict anew.
        engine: the DeepSpeed config of this call, if any.
        spoilt: what is wrong with checkpoints whose files have the right sizes.

    Raises:
        ConfigError: if there is nothing to resume, or if the run would become another one.
    """
    folder = config.folder
    found = checkpoints_of(folder)
    if not found:
        raise ConfigError(f"--resume: there is no checkpoint in {folder}; leave --resume out to start afresh")
    notes = []
    for number, path in reversed(found.items()):
        if not (what := (spoilt or {}).get(path) or damage(path)):
            step = number
            break
        notes.append(f"the checkpoint {path} is damaged ({what})")
    else:
        raise ConfigError(f"--resume: {'; '.join(notes)}, and no other is left; leave --resume out to start afresh")
    notes = [f"{note}; an older one is used" for note in notes]
    notes += _changes(_saved_config(folder), config)
    _check_engine(folder / ENGINE_FILE, engine)
    _check_text(folder, text)
    if config.run.steps < step:
        raise ConfigError(f"--resume: run.steps = {config.run.steps}, but {step} steps are done; nothing left to train")
    # A run that was stopped after its last step still lacks its verdict.
    if config.run.steps == step and not has_more and (folder / "summary.json").exists():
        raise ConfigError(
            f"--resume: all {step} steps are done, nothing left to train; the results are in {folder}, "
            "and a larger run.steps trains on"
        )
    return ResumePoint(path, step, tuple(notes))


def _changes(saved: Config, config: Config) -> list[str]:
    notes = []
    for key, (old, new) in changed_keys(saved, config).items():
        if key not in FREE_KEYS:
            raise ConfigError(
                f"--resume: {key} was {old} and is {new} now, which would make it another run; "
                "set it back, or start a run of another run.name"
            )
        note = f"note: {key} was {old} and is {new} from here on"
        notes.append(note + (", and the learning rate follows the new length" if key == "run.steps" else ""))
    return notes


def _check_engine(kept: Path, engine: Mapping[str, Any] | None) -> None:
    if engine is None:
        if kept.exists():
            raise ConfigError("--resume: the run was started with --deepspeed; give that again")
        return
    try:
        saved = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            f"--resume: there is no DeepSpeed config in {kept}, so the run was not one with --deepspeed; "
            "leave --deepspeed out, or start a run of another run.name"
        ) from None
    for key, (old, new) in changed_engine_keys(saved, engine).items():
        raise ConfigError(
            f"--resume: {key} of the DeepSpeed config was {old} and is {new} now, which would make it another run; "
            "set it back, or start a run of another run.name"
        )


def _saved_config(folder: Path) -> Config:
    try:
        return load_config(folder / "config.toml")
    except ConfigError as error:
        raise ConfigError(
            f"--resume: the settings that the run itself keeps in {folder / 'config.toml'} cannot be used; "
            f"bring that file back, or leave --resume out to start afresh ({error})"
        ) from None


def _check_text(folder: Path, text: Text) -> None:
    kept = folder / "text.json"
    try:
        before = kept.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--resume: {kept}, which tells texts apart, cannot be read: {error.strerror}") from None
    if not before:
        raise ConfigError(
            f"--resume: {kept}, which tells texts apart, is empty; bring it back, or leave --resume out to start afresh"
        )
    if before != describe(text):
        raise ConfigError(
            f"--resume: the text of {text.source} is not the one that the run was trained on; "
            "give that one in data.path, or start a run of another run.name"
        )
