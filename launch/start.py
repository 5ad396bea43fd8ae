"""Where a session begins: in a new run, or at which step of an earlier one; and the folder, made ready for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import clear_partial, move_aside, on_rank_0, spoilt_file
from cluster import Cluster
from data import Text
from distscale import ConfigError, JsonlRecord
from distscale.config import Config, dump_config
from distscale.faults import Fault
from engine_config import dump_settings
from files import sync, write_whole
from job import names_of_job
from resume import ENGINE_FILE, ResumePoint, can_resume, describe, resume_point
from summary import missing_steps, read_record

__all__ = ["Start", "find_start", "prepare"]

JOB_FILE = "job.txt"
"""Where a run keeps the names of the job that trains it."""


@dataclass(frozen=True)
class Start:
    """Where a session begins; equal on all ranks."""

    resumed: ResumePoint | None
    """Where an earlier run goes on, or None for a new one."""
    restart: int
    """How often the job has been started again."""
    job: frozenset[str]
    """Its names."""


def find_start(
    config: Config, text: Text, engine: Mapping[str, Any] | None, resumed: ResumePoint | None, cluster: Cluster
) -> Start:
    """Resumes what was started again, asked or not, and checks that all ranks start alike. Collective: yes.

    Args:
        config: of this call.
        text: of this call.
        engine: the DeepSpeed config of this call, if any.
        resumed: where this rank would go on, as asked for; None to start afresh.
        cluster: connected.

    Raises:
        ConfigError: if the ranks would start at different steps, or a run that was started again cannot go on.
    """
    # Each agent of torchrun counts the failures of its own workers alone, and each rank looks at the folder by itself.
    own = (cluster.environment.restart_count, names_of_job(os.environ), names_of_job(os.environ, restarted=True))
    restarts, names, names_again = zip(*cluster.gather(own), strict=True)
    nothing = frozenset[str]()
    again = nothing.union(*names_again) & _names_of_run(config.folder)
    if not resumed and again and can_resume(config.folder):
        resumed = resume_point(config, text, has_more=True, engine=engine)
    _check_alike(resumed, config, cluster)
    spoilt: dict[Path, str] = {}
    while resumed and (found := next(filter(None, cluster.gather(_spoilt_file(resumed.path, cluster))), None)):
        spoilt[resumed.path] = found
        resumed = resume_point(config, text, has_more=True, engine=engine, spoilt=spoilt)
    return Start(resumed, max(restarts), nothing.union(*names))


def prepare(
    start: Start,
    config: Config,
    text: Text,
    engine: Mapping[str, Any] | None,
    faults: Sequence[Fault],
    cluster: Cluster,
    say: Callable[[str], None],
) -> None:
    """Makes the folder of the run; an earlier run there is moved, never removed. Collective: yes.

    Args:
        start: of the session.
        config: of this call.
        text: of this call.
        engine: the DeepSpeed config of this call, if any.
        faults: to come, to be told.
        cluster: connected.
        say: prints a sentence on rank 0.

    Raises:
        OSError: on all ranks, if the folder cannot be written.
    """
    folder, resumed = config.folder, start.resumed

    def write() -> None:
        if not resumed and (aside := move_aside(folder)):
            say(f"the earlier run {folder} is now {aside}")
        folder.mkdir(parents=True, exist_ok=True)
        # It may be what fills the disk.
        clear_partial(folder)
        for note in resumed.notes if resumed else ():
            say(note)
        if resumed:
            record = folder / "steps.jsonl"
            JsonlRecord(record, resumed.step).close()
            sync(record)
            if missing := missing_steps(read_record(record), resumed.step):
                say(f"note: {record} lacks {len(missing)} of the steps so far, the first is {missing[0]}")
        # The verdict on fewer steps would outlive them.
        (folder / "summary.json").unlink(missing_ok=True)
        write_whole(folder / JOB_FILE, "".join(f"{name}\n" for name in sorted(start.job)))
        write_whole(folder / "text.json", describe(text))
        write_whole(folder / "config.toml", dump_config(config) if engine is None else dump_settings(config))
        if engine is not None:
            write_whole(folder / ENGINE_FILE, json.dumps(engine, indent=2) + "\n")

    try:
        on_rank_0(write)
    except OSError as error:
        raise OSError(f"the folder {folder} of the run cannot be written: {error}") from None
    if cluster.device.type == "cpu":
        say(f"{cluster.world_size} ranks on the CPU, gloo")
    else:
        say(f"{cluster.world_size} ranks on GPUs, NCCL")
    if faults:
        say(f"faults to come: {'; '.join(map(str, faults))}")
    say(f"text: {text.source}, {len(text.train) + len(text.validation):,} tokens")


def _names_of_run(folder: Path) -> set[str]:
    """The names of the job that has trained the run which is there; an earlier job may have left it."""
    kept = folder / JOB_FILE
    return set(kept.read_text(encoding="utf-8").splitlines()) if kept.exists() else set()


def _check_alike(resumed: ResumePoint | None, config: Config, cluster: Cluster) -> None:
    steps = cluster.gather(resumed.step if resumed else 0)
    if len(set(steps)) > 1:
        told = ", ".join(f"rank {rank} at {step}" for rank, step in enumerate(steps))
        raise ConfigError(
            f"the ranks would not start at the same step ({told}); all must see the same folder {config.folder}"
        )


def _spoilt_file(path: Path, cluster: Cluster) -> str | None:
    return spoilt_file(path, cluster.rank, cluster.world_size)
