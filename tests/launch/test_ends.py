"""How a run of one rank ends that hangs, that has failed its verdict, and that is to stop before it has begun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import output_of
from sessions import run_in_session, tiny_config

from checkpoints import checkpoints_of
from cluster import leave_last_words

LAUNCH = Path(__file__).parents[2] / "launch"
FORKED_RANKS = Path(__file__).with_name("forked_ranks.py")
DEADLINE_S = 100.0
# Asked three times while it imports torch, which takes seconds. Says what it brings to the disk.
STOPPED_EARLY = f"""
import os, runpy, signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)

def fsync(number, fsync=os.fsync):
    print("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{{number}}")), flush=True)
    fsync(number)

sys.meta_path.insert(0, Finder)
os.fsync = fsync
sys.argv[0] = {str(LAUNCH / "pretrain.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def prepare(folder: Path) -> None:
    (folder / "text.txt").write_bytes(b"the lazy dog sleeps on. " * 400)
    (folder / "tiny.toml").write_text(tiny_config(8, "checkpoint_every = 3\nlog_every = 1\n"))


def test_a_rank_that_hangs_ends_itself_and_a_failed_verdict_is_not_trained_for_again(tmp_path: Path) -> None:
    prepare(tmp_path)
    # Too slow to learn anything. Nobody but the rank itself ends the first life.
    settings = ["--set", "train.lr=1e-30", "--set", "parallel.timeout_s=2"]
    command = [sys.executable, str(FORKED_RANKS), "[[0], [0], [0]]", "1", "tiny.toml", *settings]
    last_words = tmp_path / "last_words"
    environ = {"DISTSCALE_FAULTS": "hang step=4 rank=0", "DISTSCALE_LAST_WORDS": str(last_words)}
    ended = run_in_session(command, tmp_path, environ, DEADLINE_S, subprocess.STDOUT)
    assert ended.returncode == 1, ended.stdout
    hung, failed, again = (output_of(tmp_path, life, 0) for life in range(3))
    told = "error: rank 0 at step 4: ends itself, since this step has not ended in 10 s, 5 times parallel.timeout_s"
    told = rf"^{told}; it waits in wait \(.*, called by before_exchange \(injector.py:\d+\).*\n"
    sentence = re.search(told, hung, re.M)
    assert sentence is not None, hung
    assert re.search(r"^Thread .*\n(  File .*\n)*  File .* in before_exchange$", hung, re.M), hung
    assert "resumed runs/tiny at step 3\n" in failed, failed
    verdict = re.search(r"^FAIL: validation loss .* is not below .*$", failed, re.M)
    assert verdict is not None, failed
    # What a wrapper repeats below its launcher's report.
    assert last_words.read_text() == f"{sentence[0]}{verdict[0]}\n{verdict[0]}\n"
    assert again == f"the run runs/tiny was completed before this restart, and is left as it is\n{verdict[0]}\n"
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert (summary["verdict"], summary["missing_steps"]) == (verdict[0], [])


def test_a_process_that_keeps_the_lock_of_python_ends_all_the_same() -> None:
    program = "import ctypes, watchdog; watchdog.Watchdog(3, 0.125, print).begin(7); ctypes.PyDLL(None).sleep(1000)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=LAUNCH, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("Timeout (0:00:00.750000)!\n")


def test_signals_that_come_before_a_run_has_begun_let_it_save_and_end_well(tmp_path: Path) -> None:
    prepare(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_EARLY, "tiny.toml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(LAUNCH)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert "stopped after step 1 of 8; everything is saved in runs/tiny\n" in ended.stdout
    assert list(checkpoints_of(tmp_path / "runs" / "tiny")) == [1]
    # A checkpoint counts on the record of the steps before it.
    assert ended.stdout.index("fsync steps.jsonl\n") < ended.stdout.index("fsync manifest.json.tmp\n")


def test_last_words_are_no_error_on_a_host_that_does_not_see_the_file_of_the_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSCALE_LAST_WORDS", str(tmp_path / "elsewhere" / "last_words"))
    leave_last_words("error: rank 2 at step 12: the first")
    (tmp_path / "elsewhere").mkdir()
    leave_last_words("error: rank 2 at step 12: the second")
    assert (tmp_path / "elsewhere" / "last_words").read_text() == "error: rank 2 at step 12: the second\n"
