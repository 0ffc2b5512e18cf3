#!/usr/bin/env bash
# N nodes under Slurm, a task for each GPU. Slurm starts the processes itself: one that fails ends them all, and five
# minutes before the time limit all get the signal to save and stop; submit the same again to continue.
#
#   sbatch --nodes 4 launch/slurm.sh pretrain CONFIG --set data.train=PREFIX --output /shared/out/run
#
# The repository, the data and the output lie on a file system that all nodes share.
#SBATCH --job-name=essh
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail
# Slurm runs a copy of this file: the repository is where it was submitted from, or where ROOT says.
root=${ROOT:-${SLURM_SUBMIT_DIR:?run this with sbatch}}
. "$root/launch/environment.sh"

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
export WORLD_SIZE=$SLURM_NTASKS

# Each task's own numbers are known only where it runs.
exec srun --kill-on-bad-exit=1 --wait=60 bash -c \
    'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' task "$python" "$root/launch/$command.py" "$@"
