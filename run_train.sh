#!/usr/bin/env bash
# Train: ./run_train.sh [CONFIG.toml] [--section.field value ...]
#
#   ./run_train.sh                                               debug model on the CPU, about 20 steps
#   ./run_train.sh train_configs/ling_debug_grpo.toml            another configuration
#   ./run_train.sh train_configs/ling_debug.toml --training.steps 5 --tree.mode expanded
#   NGPU=2 ./run_train.sh CONFIG.toml                            two ranks on this machine
#
# Relative paths are those of the folder it is called from. More nodes, by the usual torchrun variables: NNODES, NODE_RANK,
# MASTER_ADDR, MASTER_PORT (see scripts/train.slurm). LOG_RANK: ranks whose output is shown, comma-separated (default 0).
set -euo pipefail
harts_root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
config="$harts_root/train_configs/ling_debug.toml"
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  config="$1"
  shift
fi
if [ ! -f "$config" ]; then
  echo "error: configuration file '$config' does not exist; see $harts_root/train_configs/" >&2
  exit 2
fi
. "$harts_root/scripts/environment.sh" ""
# This checkout, whatever the environment has installed.
export PYTHONPATH="$harts_root${PYTHONPATH:+:$PYTHONPATH}"
# One CPU thread per rank, torchrun's own default for several ranks: small kernels lose more to thread barriers than they
# gain from threads, and CPU runs are for checking, not for speed.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
if [ "${NNODES:-1}" = 1 ] && [ "${NGPU:-1}" = 1 ]; then
  # One rank needs no launcher, and its exit status and output stay its own.
  exec python -m harts_titan.train --job.config_file "$config" "$@"
fi
rendezvous=(--rdzv_backend c10d --rdzv_endpoint "localhost:0")
if [ "${NNODES:-1}" != 1 ]; then
  : "${MASTER_ADDR:?NNODES > 1 needs MASTER_ADDR}"
  rendezvous=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_id "${RDZV_ID:-harts}" \
    --rdzv_endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" ${NODE_RANK:+--node_rank "$NODE_RANK"})
fi
exec torchrun --nproc_per_node "${NGPU:-1}" "${rendezvous[@]}" --local-ranks-filter "${LOG_RANK:-0}" \
  --role rank --tee 3 -m harts_titan.train --job.config_file "$config" "$@"
