"""What a run leaves on the disk: in which order it gets there, and how damage is noticed."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import checkpoints_of, damage, partial_path, publish, read_back, spoilt_file
from cluster import Cluster
from distscale.config import Config
from distscale.env import Environment
from distscale.sections import RunSection, TrainSection
from files import checksum, write_whole
from saver import Saver


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is brought to the disk, and renamed, in order."""
    noted: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def note_fsync(number: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        noted.append(f"fsync {path.name}{'/' if path.is_dir() else f' of {path.stat().st_size}'}")
        fsync(number)

    def note_rename(function: Any) -> Any:
        def renamed(old: Any, new: Any) -> None:
            noted.append(f"{Path(old).name} -> {Path(new).name}")
            function(old, new)

        return renamed

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename(rename))
    monkeypatch.setattr(os, "replace", note_rename(replace))
    return noted


@pytest.fixture
def alone() -> Iterator[Cluster]:
    cluster = Cluster.from_environment(Environment())
    cluster.connect(30.0)
    yield cluster
    cluster.disconnect()


def write_checkpoint(folder: Path, step: int, keep: int = 2) -> Path:
    aside = partial_path(folder, step)
    aside.mkdir(parents=True)
    for name in ("part", ".metadata"):
        (aside / name).write_text(f"{name} of {step}")
    return publish(folder, step, keep, read_back(aside))


def test_a_checkpoint_is_on_the_disk_before_its_manifest_and_that_before_its_name(
    tmp_path: Path, alone: Cluster, calls: list[str]
) -> None:
    final = write_checkpoint(tmp_path, 5)
    size = (final / "manifest.json").stat().st_size
    assert calls == [
        *("fsync .metadata of 14", "fsync part of 9"),
        *(f"fsync manifest.json.tmp of {size}", "manifest.json.tmp -> manifest.json", "fsync partial_5/"),
        *("partial_5 -> step_5", "fsync checkpoints/"),
    ]


def test_a_file_is_replaced_whole_or_left_alone(tmp_path: Path, calls: list[str]) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, "old")
    assert calls == ["fsync config.toml.tmp of 3", "config.toml.tmp -> config.toml", f"fsync {tmp_path.name}/"]
    write_whole(path, "old")
    assert len(calls) == 3
    write_whole(path, "newer")
    assert (path.read_text(), len(calls)) == ("newer", 6)


def test_what_cannot_be_brought_to_the_disk_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "config.toml"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_damage_is_noticed_by_size_at_once_and_by_checksum_before_loading(tmp_path: Path, alone: Cluster) -> None:
    path = write_checkpoint(tmp_path, 5)
    assert damage(path) is None
    assert [spoilt_file(path, rank, 2) for rank in range(2)] == [None, None]
    (path / "part").write_text("PART of 5")
    assert damage(path) is None
    # Each of two ranks reads one of the files.
    assert [spoilt_file(path, rank, 2) for rank in range(2)] == [None, "part has other bytes than were written"]
    (path / "part").unlink()
    assert spoilt_file(path, 0, 1) == "part cannot be read: No such file or directory"
    assert damage(path) == "part is missing"
    (path / "part").write_text("part of 55")
    assert damage(path) == "part has 10 of 9 bytes"
    for manifest, words in [("{}", "is empty"), ("{", "is no list of files"), ('{"part": 9}', "is no list of files")]:
        (path / "manifest.json").write_text(manifest)
        assert damage(path) == f"manifest.json {words}"


def test_the_newest_whole_checkpoints_up_to_this_one_stay(tmp_path: Path, alone: Cluster) -> None:
    for step in (5, 10, 20):
        write_checkpoint(tmp_path, step)
    assert list(checkpoints_of(tmp_path)) == [10, 20]
    # The run has gone back to 10, since 20 was spoilt, and is stopped before it comes there again.
    write_checkpoint(tmp_path, 12, keep=1)
    assert list(checkpoints_of(tmp_path)) == [12, 20]


def test_a_checksum_does_not_depend_on_how_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123456789")
    assert checksum(path) == 0xCBF43926  # the check value in catalogues of CRCs
    monkeypatch.setattr("files._CHUNK", 2)
    assert checksum(path) == 0xCBF43926


@pytest.mark.parametrize("is_async", [False, True])
def test_a_checkpoint_that_finds_no_room_is_named_and_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Cluster, is_async: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(run=RunSection(name="tiny"), train=TrainSection(checkpoint_async=is_async))
    config.folder.mkdir(parents=True)
    saver = Saver(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(step: int) -> None:
        saver.save(step, {"weight": torch.zeros(1 << 20)})
        saver.finish()

    # What writes tensors fails as on a full disk then: halfway, without a word of why.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"/partial_3 could not be written, with [\d,.]+ MB free there: rank 0: "):
            save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((config.folder / "checkpoints").iterdir()) == []
    save(4)
    manifest = json.loads((config.folder / "checkpoints" / "step_4" / "manifest.json").read_text())
    assert manifest.keys() == {".metadata", "__0_0.distcp"}
