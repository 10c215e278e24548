#!/bin/bash
# Train over machines that this one reaches by ssh; the first of them writes RUN:
#   HOSTS="node1 node2" examples/cluster/ssh.sh DS --model DIR --out RUN
#
# Every machine needs rollout-io, DS and DIR at the same paths.
set -euo pipefail
read -ra hosts <<<"$HOSTS"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for rank in "${!hosts[@]}"; do
    command=(torchrun --nnodes "${#hosts[@]}" --node-rank "$rank" --nproc-per-node "${PER_NODE:-1}"
        --master-addr "${hosts[0]}" --master-port "${ROLLOUTS_PORT:-29400}" --no-python rollouts train "$@")
    # -tt: the command ends with the connection.
    ssh -tt "${hosts[rank]}" "cd $(printf %q "$PWD") && $(printf '%q ' "${command[@]}")" &
done
status=0
for _ in "${hosts[@]}"; do
    wait -n || { status=$?; break; }
done
exit "$status"
