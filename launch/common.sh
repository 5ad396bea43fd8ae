# shellcheck shell=bash
# What torchrun.sh and mpirun.sh have in common; they source this. A mistake in the call is told once, before anything
# is started. Ctrl-C or SIGTERM lets the run save and end with exit code 0; a second one ends it at once. SIGUSR2 does
# the former alone, and so does whoever kills the script.
set -uo pipefail

launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# `make` keeps its virtual environment there; what the user has activated is as good.
[[ -x $launch/../.venv/bin/python ]] && PATH="$(cd "$launch/../.venv/bin" && pwd):$PATH"

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
    DISTSCALE_TERMINAL_OF='' exec python -c "$foreground" 0 "$0" "$@"
fi
owner=${DISTSCALE_TERMINAL_OF:-}
# Stopping this script alone would leave a terminal that nobody reads.
[[ -n $owner ]] && trap '' TSTP

# What is put there reaches the ranks that see it. `shared` is a folder that those of other hosts see, too, if any.
folder=$(mktemp -d "${shared:-${TMPDIR:-/tmp}}/.distscale-XXXXXX" 2>/dev/null) || folder=$(mktemp -d)
finish() {
    rm -rf "$folder"
    [[ -n $owner ]] && python -c "$foreground" "$owner" 2>/dev/null
}
trap finish EXIT

fail() { # SENTENCE
    echo "error: $1" >&2
    exit 2
}

# Finds mistakes in the call, and sets `ranks` to how many this machine is to have.
check() { # ARGUMENTS...
    [[ ${NPROC:-1} =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$NPROC is no number of ranks; give a whole number from 1 on"
    trap give_up INT TERM HUP USR2
    # With job control the check gets a process group of its own, out of reach of the terminal's Ctrl-C.
    set -m
    python "$launch/pretrain.py" --check "$@" >"$folder/ranks" &
    set +m
    wait $! || exit $?
    ranks=$(<"$folder/ranks")
    # --help was asked for, and given.
    [[ $ranks =~ ^[0-9]+$ ]] || { echo "$ranks"; exit 0; }
    ranks=${NPROC:-$ranks}
}
give_up() {
    # shellcheck disable=SC2046 # a list of numbers
    { kill -KILL $(jobs -p); wait; } 2>/dev/null
    echo "stopped before anything was started" >&2
    exit 0
}

# The ranks read these. They say by the last how to go on after a stop.
export DISTSCALE_STOP_FILE="$folder/stop" DISTSCALE_LAST_WORDS="$folder/last_words" DISTSCALE_LAUNCHER
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
call_of_this() { # NAMES OF VARIABLES...
    local name
    for name; do
        [[ -n ${!name:-} ]] && printf '%s=%q ' "$name" "${!name}"
    done
    printf '%q' "$0"
}

# Runs the launcher to its end, and ends this script with its exit code.
agent=
run() { # COMMAND...
    : >"$DISTSCALE_LAST_WORDS"
    trap stop INT TERM HUP
    # A warning that the time will be up, which nobody gives to end a run at once.
    trap ask USR2
    local watch code
    # With job control it gets a process group of its own, out of reach of the terminal's Ctrl-C.
    set -m
    "$@" </dev/null &
    agent=$!
    watch_over_workers >/dev/null 2>&1 &
    watch=$!
    disown "$watch"
    set +m
    # A trapped signal ends the wait, not the run; once the run has ended, wait tells its exit code again.
    while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
    wait "$agent"
    code=$?
    kill -KILL -- -"$watch" 2>/dev/null
    # The launcher's report of the failure comes last otherwise.
    ((code)) && cat "$DISTSCALE_LAST_WORDS" >&2
    exit "$code"
}
ask() {
    touch "$DISTSCALE_STOP_FILE"
    echo "stopping: the run saves after this step${1:-}" >&2
}
is_told=
stop() {
    if [[ -z $is_told ]]; then
        is_told=1
        ask " (once more to end it at once)"
        return
    fi
    echo "ending at once" >&2
    # Before its workers are gone, which it would start again; those of other machines it ends itself.
    kill -TERM "$agent" 2>/dev/null
    end_workers "$(workers)"
}
workers() { cat /proc/"$agent"/task/*/children 2>/dev/null; }
end_workers() { # PIDS
    local worker
    for worker in $(workers); do
        [[ " $1 " == *" $worker "* ]] && kill -KILL "$worker" 2>/dev/null
    done
}

# A rank that hangs once another has failed is ended: torchrun would give it half a minute, whatever its options say.
# If this script was killed, nobody could stop the run any more, so it is stopped.
watch_over_workers() {
    local size told=0 failed
    # Linux alone tells of processes there.
    [[ -e /proc/$$/exe ]] || return
    # What has ended has no exe any more, though it may wait for long to be asked how it ended.
    while [[ -e /proc/$agent/exe ]]; do
        [[ -e /proc/$$/exe ]] || touch "$DISTSCALE_STOP_FILE"
        # If one of these leaves its last words, none of them is of a life after that.
        failed=$(workers)
        sleep 1
        size=$(wc -c <"$DISTSCALE_LAST_WORDS")
        ((size > told)) || continue
        sleep 5
        end_workers "$failed"
        told=$(wc -c <"$DISTSCALE_LAST_WORDS")
    done
    [[ -e /proc/$$/exe ]] || rm -rf "$folder"
}
