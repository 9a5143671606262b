#!/usr/bin/env bash
# Starts a Ray cluster's first node on this machine, waits for the others, trains, and ends the node.
#
#   NODES=3 ROLE=actor SLOTS=8 bash launch/ray_head.sh [--dry-run] --config=… --workdir=… […]
#
# NODES   nodes of the cluster, this one included (2)
# ROLE    actor, reward or both: which group's workers this node takes (actor)
# SLOTS   how many of them, of each group (1)
# PORT    where the other nodes find this one (6379)
# ADDRESS this machine's address in the cluster's network (its first)
# WAIT_S  how long to wait for the other nodes (600)
#
# The workdir must be on a file system that all nodes share. --dry-run only prints.
set -euo pipefail
cd "$(dirname "$0")/.."

dry_run=0
if [[ "${1:-}" == --dry-run ]]; then
  dry_run=1
  shift
fi

print() {
  printf '%q ' "$@"
  printf '\n'
}

python=${PYTHON:-python}
address=${ADDRESS:-$(hostname -I | cut -d' ' -f1)}
port=${PORT:-6379}
slots=${SLOTS:-1}
case ${ROLE:-actor} in
  both) resources="{\"actor\": $slots, \"reward\": $slots}" ;;
  *) resources="{\"${ROLE:-actor}\": $slots}" ;;
esac

node=(ray start --head --block --node-ip-address="$address" --port="$port"
  --include-dashboard=false --disable-usage-stats --resources="$resources")
nodes=("$python" launch/wait_for_nodes.py "$address:$port" "${NODES:-2}" "${WAIT_S:-600}")
train=("$python" -m sbjax.launch "$@" "--config.runtime.ray_address=$address:$port"
  --config.runtime.actor_resource=actor --config.runtime.reward_resource=reward)
print "${node[@]}"
print "${nodes[@]}"
print "${train[@]}"
if ((dry_run)); then exit 0; fi

# Nodes prove themselves by ~/.ray/auth_token; see docs/clusters.md.
ray get-auth-token --generate >/dev/null
"${node[@]}" &
ray_pid=$!
trap 'kill "$ray_pid" 2>/dev/null; wait "$ray_pid" || true' EXIT
"${nodes[@]}"
# In the background, so that a signal to this script reaches the run, which then writes a checkpoint.
"${train[@]}" &
run_pid=$!
trap 'kill -TERM "$run_pid" 2>/dev/null' INT TERM
status=0
while kill -0 "$run_pid" 2>/dev/null; do
  wait "$run_pid" && status=0 || status=$?
done
exit "$status"
