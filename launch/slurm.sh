#!/usr/bin/env bash
# An example for Slurm: `sbatch --nodes 4 launch/slurm.sh --config demo run_dir=/shared/runs/one`.
# One torchrun a node, one rank a GPU.  The repository, its .venv (made once by launch/demo.sh) and `run_dir` must lie on
# a file system that all nodes share.
#SBATCH --job-name=gdncp
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:30:00
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run this with sbatch from the repository}"

head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
srun .venv/bin/torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:29500" \
    -m gdncp.prefill "$@"
