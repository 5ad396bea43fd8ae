"""Batch scripts for SLURM, written from the settings of a job. The scripts in ``slurm/`` are what this gives."""

from __future__ import annotations

import shlex

from distscale.slurm_job import WARNING_S, Job

__all__ = ["render"]


def render(job: Job) -> str:
    """Returns the text of a batch script; equal jobs give equal texts."""
    ranks = str(job.ranks_per_node) if job.cpu else "${SLURM_GPUS_ON_NODE:?SLURM gave this job no GPU}"
    if job.trains:
        engine = f" --deepspeed {shlex.quote(job.deepspeed)}" if job.deepspeed else ""
        values = [f"config={shlex.quote(job.config)}", f'arguments=("$config"{engine} "$@")']
        values += [f"max_requeues={job.max_requeues}"]
    else:
        files = [job.config, job.deepspeed] if job.deepspeed else [job.config]
        values = [f"files=({shlex.join(files)}) # which all ranks must have alike, as they must the program"]
    values += [f"ranks={ranks} # a node"]
    start = {"torchrun": _TORCHRUN, "srun": _SRUN, "preflight": _PREFLIGHT}[job.kind]
    parts = [_header(job), "set -euo pipefail\n", "\n".join(values) + "\n", _PLACE]
    return "\n".join([*parts, _CHECK, _RESUME, start + _WAIT, _REQUEUE] if job.trains else [*parts, start])


def _header(job: Job) -> str:
    directives = [
        *([] if job.cpu else [f"gpus-per-node={job.ranks_per_node}"]),
        f"job-name={job.name}" if job.trains else f"job-name={job.name}_preflight",
        "exclusive",
        "mem=0",
        *([f"time={job.time}"] if job.time else []),
        *([f"signal=B:USR2@{WARNING_S}", "requeue"] if job.trains else []),
        "output=slurm/logs/%x-%j.log",
        "open-mode=append",
    ]
    what = {
        "torchrun": "Pretrains on all nodes, one torchrun a node.",
        "srun": "Pretrains on all nodes, one task a rank.",
        "preflight": "Runs `distscale check` in place of every rank.",
    }[job.kind]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --account={job.account}",
        f"#SBATCH --partition={job.partition}",
        f"#SBATCH --nodes={job.nodes}",
        "# The three lines above are yours to edit; the rest is what this writes:",
        "#",
        f"#   {_command(job)}",
        "#",
        *(f"#SBATCH --{directive}" for directive in directives),
        "#",
        f"# {what} To be submitted from the root of the repository, on a file system that",
        "# all nodes share. Output goes to slurm/logs: a file of the job, and one of each node.",
    ]
    return "\n".join(lines) + "\n" + (_ABOUT_STOPS if job.trains else "")


def _command(job: Job) -> str:
    """The command line that gives this script but for what the user edits in it."""
    words = ["distscale", "slurm", "render", job.config]
    words += ["--kind", job.kind] if job.kind != Job.kind else []
    words += ["--deepspeed", job.deepspeed] if job.deepspeed else []
    words += ["--cpu"] if job.cpu else []
    words += ["--ranks-per-node", str(job.ranks_per_node)] if job.ranks_per_node != Job.ranks_per_node else []
    words += ["--time", job.time] if job.time else []
    words += ["--max-requeues", str(job.max_requeues)] if job.max_requeues != Job.max_requeues else []
    return shlex.join(words)


_ABOUT_STOPS = f"""\
#
#   sbatch SCRIPT [--resume]    # a new run, or on from the newest checkpoint
#   scancel JOB                 # saves, and ends for good
#
# {WARNING_S // 60} minutes before the time is up SLURM sends USR2: the run saves, and the job goes back into the queue
# and on bitwise as if never stopped. After a failure it does so if this start has made a checkpoint.
"""

_PLACE = """\
fail() {
    echo "error: $1" >&2
    exit 2
}
[[ -f launch/pretrain.py && -d slurm/logs ]] || fail "$PWD is not the root of the repository; submit from there"
[[ -x .venv/bin/python ]] && PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
log=$PWD/slurm/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID

start() { # TASKS_PER_NODE COMMAND...
    # In the background there is no shell between, which SLURM's TERM would end before the ranks have saved.
    exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="$1" --ntasks=$((SLURM_JOB_NUM_NODES * $1)) \\
        --cpus-per-task=$((SLURM_CPUS_ON_NODE > $1 ? SLURM_CPUS_ON_NODE / $1 : 1)) --kill-on-bad-exit=1 \\
        --output="$log-%N.log" --open-mode=append "${@:2}"
}
"""

_CHECK = """\
for word; do
    [[ $word == --resume ]] || fail "$word: there is only --resume; settings are in $config"
done
restarts=${SLURM_RESTART_COUNT:-0}
# A mistake is told once, before any rank starts.
((restarts)) || python launch/pretrain.py --check "${arguments[@]}" >/dev/null
folder='import sys; from distscale.config import load_config; print(load_config(sys.argv[1]).folder)'
run=$(python -c "$folder" "$config")

# The ranks look for this file, and agree at which step they stop.
export DISTSCALE_STOP_FILE=$log.stop
# For what the program says when it stops: "to continue: ... CONFIG --resume".
export DISTSCALE_LAUNCHER="sbatch SCRIPT --resume #"
rm -f "$DISTSCALE_STOP_FILE"
stop() {
    touch "$DISTSCALE_STOP_FILE"
    echo "stopping: the run saves after this step"
}
is_cancelled=
trap stop USR2
trap 'is_cancelled=1; stop' TERM
"""

_RESUME = """\
# What is older than the job is of another run of this name.
begun=$log.begun
((restarts)) || touch "$begun"
is_complete() { [[ $run/summary.json -nt $begun ]]; }
checkpoints() { find "$run/checkpoints" -maxdepth 1 -name 'step_*' -newer "$begun" 2>/dev/null || true; }
saved=$(checkpoints)
if ((restarts)) && is_complete; then exit 0; fi
"""

_HEAD = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((10000 + SLURM_JOB_ID % 20000))
"""

_TORCHRUN = (
    _HEAD
    + """\
# A torchrun that is left over from before a requeue is of another rendezvous.
export RENDEZVOUS="--rdzv-backend=c10d --rdzv-endpoint=$head:$port --rdzv-id=$SLURM_JOB_ID.$restarts"
# shellcheck disable=SC2016 # each node is to expand it
start 1 bash -c '
    is_host=$((SLURM_NODEID == 0)) # torchrun would guess it from host names
    exec torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$1" $RENDEZVOUS --rdzv-conf="is_host=$is_host" "${@:2}"
' - "$ranks" launch/pretrain.py "${arguments[@]}" &
"""
)

_SRUN = """\
start "$ranks" python launch/pretrain.py "${arguments[@]}" &
"""

_PREFLIGHT = """\
start "$ranks" distscale check "${files[@]}" launch/*.py
"""

_WAIT = """\
srun=$!
# A trapped signal ends the wait, not the step; once that has ended, wait tells its exit code again.
while kill -0 "$srun" 2>/dev/null; do wait "$srun" || true; done
code=0
wait "$srun" || code=$?
"""

_REQUEUE = """\
if is_complete; then
    rm -f "$begun" "$DISTSCALE_STOP_FILE"
    exit "$code"
fi
[[ -z $is_cancelled ]] || exit "$code"
if ((code == 0)); then
    echo "the run was stopped, and has saved"
elif [[ $(checkpoints) != "$saved" ]]; then
    echo "the run failed with exit code $code, after a new checkpoint"
else
    echo "error: the run failed with exit code $code, and has saved nothing new; it is not tried again" >&2
    exit "$code"
fi
if ((restarts >= max_requeues)); then
    echo "error: the job was requeued $restarts times; submit it with --resume to go on" >&2
    exit 1
fi
echo "requeued, $((restarts + 1)) of at most $max_requeues times"
scontrol requeue "$SLURM_JOB_ID"
"""
