#!/usr/bin/env bash
# Starts launch/pretrain.py under torchrun, one rank a GPU or two on the CPU (NPROC says otherwise).
#
#   launch/torchrun.sh configs/fsdp2_fp16.toml [--resume] [--compare] [--set section.key=value]
#
# Ctrl-C or SIGTERM lets the run save and end with exit code 0; a second one ends it at once. torchrun by itself
# passes the signal on, too, but then reports failure whatever its workers made of it. So the workers are told
# through a file, and torchrun sees them end well.
set -uo pipefail

launch=$(dirname "${BASH_SOURCE[0]}")
# `make` keeps its virtual environment there; what the user has activated is as good.
[[ -x $launch/../.venv/bin/torchrun ]] && PATH="$(cd "$launch/../.venv/bin" && pwd):$PATH"

# make dies of a Ctrl-C, however well its recipe ends. So under make this takes the terminal for a process group of
# its own, which alone is sent the Ctrl-C then, and gives it back at the end.
foreground='
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
group, *command = sys.argv[1:]
if not command:
    os.tcsetpgrp(0, int(group))
elif os.getpid() != os.getpgrp() == os.tcgetpgrp(0):
    os.environ["DISTSCALE_TERMINAL_OF"] = str(os.getpgrp())
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
signal.signal(signal.SIGTTOU, signal.SIG_DFL)
command and os.execv(command[0], command)
'
if [[ -t 0 && -z ${DISTSCALE_TERMINAL_OF+set} ]]; then
    DISTSCALE_TERMINAL_OF= exec python -c "$foreground" 0 "${BASH_SOURCE[0]}" "$@"
fi
owner=${DISTSCALE_TERMINAL_OF:-}
finish() {
    [[ -n ${folder:-} ]] && rm -rf "$folder"
    [[ -n $owner ]] && python -c "$foreground" "$owner" 2>/dev/null
}
trap finish EXIT
# Stopping this script alone would leave a terminal that nobody reads.
[[ -n $owner ]] && trap '' TSTP

folder=$(mktemp -d)
give_up() {
    { kill -KILL $(jobs -p); wait; } 2>/dev/null
    echo "stopped before anything was started" >&2
    exit 0
}
trap give_up INT TERM HUP

# A mistake in the call is told once, before torchrun can add a report of its own to it. With job control the check
# gets a process group of its own, out of reach of the terminal's Ctrl-C.
set -m
python "$launch/pretrain.py" --check "$@" >"$folder/ranks" &
set +m
wait $! || exit $?
ranks=$(<"$folder/ranks")
# --help was asked for, and given.
[[ $ranks =~ ^[0-9]+$ ]] || { echo "$ranks"; exit 0; }

export DISTSCALE_STOP_FILE="$folder/stop" DISTSCALE_LAST_WORDS="$folder/last_words" DISTSCALE_LAUNCHER="$0"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

agent=
end_workers() {
    local worker
    for worker in $(cat /proc/"$agent"/task/*/children 2>/dev/null); do
        kill -KILL "$worker" 2>/dev/null
    done
}
stop() {
    if [[ ! -e $DISTSCALE_STOP_FILE ]]; then
        touch "$DISTSCALE_STOP_FILE"
        echo "stopping: the run saves after this step (once more to end it at once)" >&2
        return
    fi
    echo "ending at once" >&2
    # torchrun gives its workers half a minute on SIGTERM; these are not to have it.
    end_workers
    kill -TERM "$agent" 2>/dev/null
}
trap stop INT TERM HUP

# With job control torchrun gets a process group of its own, out of reach of the terminal's Ctrl-C.
set -m
torchrun --standalone --nproc-per-node "${NPROC:-$ranks}" "$launch/pretrain.py" "$@" &
agent=$!
# torchrun would give half a minute to a rank that hangs once another has failed, whatever its options say.
{
    while kill -0 "$agent" && [[ ! -s $DISTSCALE_LAST_WORDS ]]; do sleep 1; done
    sleep 5
    end_workers
} >/dev/null 2>&1 &
watch=$!
disown "$watch"
set +m

# A trapped signal ends the wait, not the run; once the run has ended, wait tells its exit code again.
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do
    wait "$agent"
    code=$?
done
kill -KILL -- -"$watch" 2>/dev/null
# torchrun's report of the failure comes last otherwise.
[[ $code != 0 && -s $DISTSCALE_LAST_WORDS ]] && cat "$DISTSCALE_LAST_WORDS" >&2
exit "$code"
