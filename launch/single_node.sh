#!/usr/bin/env bash
# Trains on this machine.
#
#   bash launch/single_node.sh [--dry-run] --config=… --workdir=… [--config.FIELD=…]
#
# With GPUs, one worker each: it shares them between the groups as ACTORS and REWARDS say (all but a
# third, and the rest). Without, the config's own workers run on the cores. --dry-run only prints.
set -euo pipefail

dry_run=0
if [[ "${1:-}" == --dry-run ]]; then
  dry_run=1
  shift
fi

gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
words=("$@")
if ((gpus > 0)); then
  rewards=${REWARDS:-$((gpus / 3))}
  actors=${ACTORS:-$((gpus - rewards))}
  words+=(
    --config.runtime.gpus_per_worker=1
    "--config.runtime.actor_workers=$actors"
    "--config.runtime.reward_workers=$rewards"
  )
fi

command=("${PYTHON:-python}" -m sbjax.launch "${words[@]}")
printf '%q ' "${command[@]}"
printf '\n'
((dry_run)) || exec "${command[@]}"
