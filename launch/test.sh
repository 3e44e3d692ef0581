#!/usr/bin/env bash
# Set up, then run the tests; arguments go to pytest.  On a GPU: launch/test.sh -m gpu
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev

cd "$repo_dir"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the tests run beside each other; a thread pool in each would only get in the way
exec python -m pytest -n "${WORKERS:-2}" "$@"
