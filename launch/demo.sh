#!/usr/bin/env bash
# Set up, then prefill a Qwen3-Next layer's inputs over several ranks and check the result: one NCCL rank a GPU, or
# without GPUs 4 gloo ranks on the CPU.  NPROC=n asks for n ranks; arguments go to gdncp.prefill (see --help).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env cli

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
ranks="${NPROC:-$((gpus > 0 ? gpus : 4))}"
threads=$(( $(getconf _NPROCESSORS_ONLN) / ranks ))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"  # ranks share the cores
exec torchrun --standalone --nproc-per-node "$ranks" -m gdncp.prefill --config demo "$@"
