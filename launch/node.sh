#!/usr/bin/env bash
# All GPUs of this machine, a process each; GPUS=n takes the first n, and on a machine without any that many processes
# run on the CPU.
#
#   launch/node.sh pretrain CONFIG --set data.train=PREFIX --output out/run                      8 replicas
#   launch/node.sh pretrain CONFIG --set parallel.tensor=2 data.train=PREFIX --output out/run    4 replicas of 2 GPUs
#
# Several machines without Slurm: the same on each, with NODES, NODE (0, 1, ...) and MASTER (the name of machine 0) set;
# or `deepspeed --hostfile launch/hostfile.example launch/pretrain.py CONFIG ...` on one of them.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/launch/environment.sh"

gpus=${GPUS:-$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c . || true)}
[ "$gpus" -gt 0 ] || { echo "error: no GPU here; set GPUS to the number of processes" >&2; exit 2; }
if [ "${NODES:-1}" -gt 1 ]; then
    where=(--nnodes "$NODES" --node-rank "${NODE:?number of this machine}" \
           --master-addr "${MASTER:?name of machine 0}" --master-port "${MASTER_PORT:-29500}")
else
    where=(--standalone)
fi
exec "$python" -m torch.distributed.run "${where[@]}" --nproc-per-node "$gpus" "$root/launch/$command.py" "$@"
