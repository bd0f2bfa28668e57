#!/bin/bash
# Train on several machines as a job of SLURM: a script to copy and change.
#
#     ooc example train_slurm > train_slurm.sh
#     sbatch --nodes 4 train_slurm.sh papers.ooc runs/papers --epochs 10 --memory 32GB
#
# Store and run are on a file system that all nodes see. torchrun starts PER_NODE processes on each node (as many as it has GPUs);
# --memory is that of one process. A job that is queued again, or submitted again, goes on where it was.
#SBATCH --job-name=ooc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

store=$1 run=$2
shift 2
resume=()
if [[ -e $run/checkpoint.pt ]]; then resume=(--resume); fi
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${PER_NODE:-1}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:${PORT:-29500}" \
    "$(command -v ooc)" train "$store" --out "$run" "${resume[@]}" "$@"
