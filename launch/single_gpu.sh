#!/usr/bin/env bash
# One GPU, or the CPU where there is none.
#
#   launch/single_gpu.sh pretrain configs/runs/quickstart.yaml --set data.train=PREFIX --output out/run
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/launch/environment.sh"

exec "$python" "$root/launch/$command.py" "$@"
