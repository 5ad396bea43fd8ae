"""Where a session begins, seen by one rank: what of the folder it goes on with, and what it leaves alone there."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_run_files import alone, write_checkpoint

from cluster import Cluster
from data import Text, load_text
from distscale import ConfigError
from distscale.config import Config, dump_config, load_config
from job import names_of_job
from resume import describe, resume_point
from start import find_start, prepare
from stop import StopRequest

__all__ = ["alone"]  # a fixture

TORCHRUN = {"TORCHELASTIC_RUN_ID": "run7", "TORCHELASTIC_RESTART_COUNT": "0"}
SLURM = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "0"}


class WithOthers(Cluster):
    """One rank of several, that is told by ``others`` what each of the others gathers, given what it does itself."""

    others: list[Callable[[Any], Any]]

    def gather(self, item: Any) -> list[Any]:
        return [item, *(other(item) for other in self.others)]


def same(item: Any) -> Any:
    return item


def first_of(cluster: Cluster, others: list[Callable[[Any], Any]]) -> WithOthers:
    world_size = 1 + len(others)
    first = WithOthers(replace(cluster.environment, world_size=world_size), cluster.device)
    object.__setattr__(first, "others", others)
    return first


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Cluster) -> tuple[Config, Text]:
    """A run of torchrun's job run7, within SLURM's job 42, with two checkpoints."""
    monkeypatch.chdir(tmp_path)
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "text.txt").write_bytes(b"the lazy dog sleeps on. " * 400)
    (tmp_path / "tiny.toml").write_text('run.name = "tiny"\ndata.path = "text.txt"\n')
    config = load_config("tiny.toml")
    text = load_text(config)
    config.folder.mkdir(parents=True)
    (config.folder / "job.txt").write_text("SLURM_JOB_ID=42\nTORCHELASTIC_RUN_ID=run7\n")
    (config.folder / "config.toml").write_text(dump_config(config))
    (config.folder / "text.json").write_text(describe(text))
    for step in (10, 20):
        write_checkpoint(config.folder, step)
    return config, text


@pytest.mark.parametrize(
    ("environ", "step"),
    [
        pytest.param(TORCHRUN, None, id="nothing was started again"),
        pytest.param(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, 20, id="torchrun's restart"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "run8", "TORCHELASTIC_RESTART_COUNT": "1"}, None, id="another torchrun's restart"
        ),
        pytest.param(SLURM | {"SLURM_RESTART_COUNT": "1"}, 20, id="a requeue"),
        pytest.param({"SLURM_JOB_ID": "43", "SLURM_RESTART_COUNT": "1"}, None, id="another job's requeue"),
        pytest.param(
            SLURM | {"TORCHELASTIC_RUN_ID": "run8", "TORCHELASTIC_RESTART_COUNT": "1"},
            None,
            id="the restart of another torchrun in the same job",
        ),
        pytest.param(
            SLURM | {"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "run8", "TORCHELASTIC_RESTART_COUNT": "0"},
            20,
            id="a requeue with a torchrun of its own",
        ),
    ],
)
def test_a_job_that_was_started_again_goes_on_with_a_run_of_its_own_alone(
    run: tuple[Config, Text], monkeypatch: pytest.MonkeyPatch, alone: Cluster, environ: Mapping[str, str], step: int
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    start = find_start(*run, None, None, alone)
    assert (start.resumed.step if start.resumed else None) == step
    assert start.job == names_of_job(os.environ)


def test_a_rank_whose_launcher_counts_no_restart_hears_of_it_from_the_others(
    run: tuple[Config, Text], monkeypatch: pytest.MonkeyPatch, alone: Cluster
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)

    def restarted(item: Any) -> Any:
        return (2, item[1], item[1]) if isinstance(item, tuple) else item

    start = find_start(*run, None, None, first_of(alone, [same, restarted, same]))
    assert start.restart == 2
    assert start.resumed is not None and start.resumed.step == 20


def test_ranks_that_see_different_checkpoints_do_not_start(run: tuple[Config, Text], alone: Cluster) -> None:
    def blind(item: Any) -> Any:
        return 10 if isinstance(item, int) else item

    config, text = run
    with pytest.raises(ConfigError, match=r"\(rank 0 at 20, rank 1 at 10\); all must see the same folder runs/tiny"):
        find_start(config, text, None, resume_point(config, text, False), first_of(alone, [blind]))


def test_a_checkpoint_with_other_bytes_is_passed_over_whichever_rank_has_read_it(
    run: tuple[Config, Text], alone: Cluster
) -> None:
    config, text = run
    newest = resume_point(config, text, False)
    content = (newest.path / "part").read_bytes()
    (newest.path / "part").write_bytes(content.upper())
    start = find_start(config, text, None, newest, alone)
    assert start.resumed is not None and start.resumed.step == 10
    assert start.resumed.notes[0] == (
        "the checkpoint runs/tiny/checkpoints/step_20 is damaged (part has other bytes than were written); "
        "an older one is used"
    )
    (newest.path / "part").write_bytes(content)
    told = iter([None, None, ".metadata has other bytes than were written", None])
    start = find_start(config, text, None, newest, first_of(alone, [lambda item: next(told) or item]))
    assert start.resumed is not None and start.resumed.step == 10
    assert "step_20 is damaged (.metadata has other bytes" in start.resumed.notes[0]
    for path in (newest.path, start.resumed.path):
        (path / "part").write_bytes(b"?" * len(content))
    with pytest.raises(ConfigError, match=r"step_20 is damaged .*step_10 is damaged .*, and no other is left"):
        find_start(config, text, None, newest, alone)


def test_a_resumed_run_loses_its_verdict_and_what_was_half_written_and_keeps_its_settings(
    run: tuple[Config, Text], alone: Cluster
) -> None:
    config, text = run
    (config.folder / "summary.json").write_text("{}")
    (config.folder / "checkpoints" / "partial_30").mkdir()
    before = {name: (config.folder / name).stat().st_ino for name in ("config.toml", "text.json")}
    said: list[str] = []
    start = find_start(config, text, None, resume_point(config, text, False), alone)
    prepare(start, config, text, None, (), alone, said.append)
    assert not (config.folder / "summary.json").exists()
    assert not (config.folder / "checkpoints" / "partial_30").exists()
    assert {name: (config.folder / name).stat().st_ino for name in before} == before
    assert (config.folder / "job.txt").read_text() == ""
    assert said[0] == "note: runs/tiny/steps.jsonl lacks 20 of the steps so far, the first is 0"


def test_a_folder_that_cannot_be_written_is_named(
    run: tuple[Config, Text], monkeypatch: pytest.MonkeyPatch, alone: Cluster
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config, text = run
    start = find_start(config, text, None, resume_point(config, text, False), alone)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"^the folder runs/tiny of the run cannot be written: \[Errno 28\] No space left"
    ):
        prepare(start, config, text, None, (), alone, lambda sentence: None)


def test_settings_that_a_crash_has_emptied_are_told_as_such(run: tuple[Config, Text]) -> None:
    config, text = run
    (config.folder / "text.json").write_text("")
    with pytest.raises(ConfigError, match=r"runs/tiny/text\.json, which tells texts apart, is empty; bring it back"):
        resume_point(config, text, False)


def test_a_torchrun_without_a_name_is_known_by_its_folder_for_errors() -> None:
    environ = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x1/none_y2/attempt_1/0/error.json",
    }
    assert names_of_job(environ, restarted=True) == {"TORCHELASTIC_ERROR_FILE=none_y2"}
    assert names_of_job(environ | {"TORCHELASTIC_ERROR_FILE": ""}) == frozenset()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of signals back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_signals_ask_for_a_stop_however_many_come(handlers: None, number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)
    stop.install()
    assert signal.getsignal(number) != before
    assert not stop.is_made()
    for _ in range(3):
        signal.raise_signal(number)
        assert stop.is_made()


def test_a_stop_file_may_come_at_any_time(tmp_path: Path) -> None:
    stop = StopRequest(str(tmp_path / "stop"))
    assert not stop.is_made()
    (tmp_path / "stop").touch()
    assert stop.is_made()
