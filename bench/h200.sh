#!/usr/bin/env bash
# Time gdncp and its peers on an H200, unattended and without network, in under 8 minutes from a bare machine:
#
#   bash bench/h200.sh OUT [SITE ...]
#
# OUT gets bench.json and bench.md.  Each SITE is a folder of installed packages (`pip install --target SITE ...`) with
# peers in it: flashinfer-python, flash-qla, flash-linear-attention.  Earlier folders win where two hold a package:
# FlashQLA's before FlashInfer's: both bring apache-tvm-ffi, tilelang needs its own, and FlashInfer takes either.
# Environment: PYTHON (python3, one that has torch), PRESET (peers-h200), TIME_BUDGET (seconds, 420), ARGS (more
# arguments of gdncp.bench, as in ARGS="--engines hopper flashinfer").
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/site.sh" || exit 2
out="${1:?usage: bash bench/h200.sh OUT [SITE ...]}"
shift
mkdir -p "$out"

use_sites "$@"
export MAX_JOBS="${MAX_JOBS:-$(getconf _NPROCESSORS_ONLN)}" # FlashInfer's

budget="${TIME_BUDGET:-420}"
cd "$repo"
# what is begun at the end of the budget still ends, or is stopped a minute later; results are written after every shape
# shellcheck disable=SC2086  # ARGS is several words
exec timeout --kill-after=10 "$((budget + 50))" "${PYTHON:-python3}" -m gdncp.bench \
    --preset "${PRESET:-peers-h200}" --prepare --time-budget "$budget" --out "$out" ${ARGS:-}
