#!/usr/bin/env bash
# Starts launch/pretrain.py under torchrun, one rank a GPU or two on the CPU (NPROC says otherwise).
#
#   launch/torchrun.sh configs/fsdp2_fp16.toml [--resume] [--compare] [--set section.key=value]
#   MAX_RESTARTS=3 launch/torchrun.sh configs/fsdp2_fp16.toml
#   NNODES=2 RDZV_ENDPOINT=node1:29400 RDZV_ID=run7 launch/torchrun.sh configs/fsdp2_fp16.toml    # the same on both
#
# MAX_RESTARTS: how often torchrun may start the ranks again after a failure; they go on from the newest checkpoint.
# NNODES: on how many nodes this is called. RDZV_ENDPOINT: where they meet, one of them and a free port there.
# RDZV_ID: a name that no earlier job had, by which a job that is started again knows its run; by default SLURM's.
# Any other option of torchrun's is a variable PET_<OPTION>, such as PET_LOCAL_ADDR or PET_RDZV_CONF=is_host=1.
#
# Ctrl-C or SIGTERM, on any one node, lets the run save and end with exit code 0; a second one ends it at once. SIGUSR2
# does the former alone. torchrun by itself passes signals on, too, but then reports failure whatever its workers made of
# them. So the workers are told through a file, and torchrun sees them end well.

# shellcheck disable=SC2034 # for common.sh: each node tells its own ranks
shared=
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

nnodes=${NNODES:-1} restarts=${MAX_RESTARTS:-0} endpoint=${RDZV_ENDPOINT:-} id=${RDZV_ID:-${SLURM_JOB_ID:-}}
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "NNODES=$nnodes is no number of nodes; give a whole number, the same on each"
[[ $restarts =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$restarts is no number of restarts; give a whole number, 0 for none"
[[ -z $endpoint || -n ${NNODES:-} ]] ||
    fail "RDZV_ENDPOINT=$endpoint, but there is no NNODES, which says how many nodes meet there; give both or none"
place=(--standalone)
if ((nnodes > 1)); then
    [[ -n $endpoint ]] || fail "NNODES=$nnodes, but there is no RDZV_ENDPOINT, where they meet; give one as node1:29400"
    [[ -n $id ]] || fail "NNODES=$nnodes, but there is no RDZV_ID; give the job a name that none had before it"
    place=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$id")
    # The store that torchrun would lend the ranks has the addresses of dead ones after a restart (pytorch#135712).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi
check "$@"

DISTSCALE_LAUNCHER=$(call_of_this NPROC MAX_RESTARTS NNODES RDZV_ENDPOINT RDZV_ID)
run torchrun "${place[@]}" --nproc-per-node "$ranks" --max-restarts "$restarts" "$launch/pretrain.py" "$@"
