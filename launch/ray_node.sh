#!/usr/bin/env bash
# Makes this machine a node of a running Ray cluster, until the cluster's head ends.
#
#   ROLE=reward SLOTS=8 bash launch/ray_node.sh [--dry-run] HEAD:PORT
#
# ROLE   actor or reward: which group's workers this node takes (reward)
# SLOTS  how many of them (1)
# WAIT_S how long to wait for the head (600)
#
# --dry-run only prints.
set -euo pipefail

dry_run=0
if [[ "${1:-}" == --dry-run ]]; then
  dry_run=1
  shift
fi
head=${1:?the address of the head is missing: HEAD:PORT}

command=(ray start --address="$head" --block --disable-usage-stats
  --resources="{\"${ROLE:-reward}\": ${SLOTS:-1}}")
printf '%q ' "${command[@]}"
printf '\n'
if ((dry_run)); then exit 0; fi

end=$((SECONDS + ${WAIT_S:-600}))
until (exec 3<>"/dev/tcp/${head%:*}/${head#*:}") 2>/dev/null; do
  if ((SECONDS > end)); then
    echo "nothing answers at $head; start launch/ray_head.sh there first" >&2
    exit 1
  fi
  sleep 1
done
exec "${command[@]}"
