#!/usr/bin/env bash
# Set up, then run the tests; arguments go to pytest.  On a GPU: launch/test.sh -m gpu
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env dev

cd "$repo_dir"
exec python -m pytest "$@"
