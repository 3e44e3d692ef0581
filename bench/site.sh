# Sourced by the scripts beside it: `use_sites SITE ...` lets Python find gdncp here and the peers in folders of installed
# packages (`pip install --target SITE ...`), earlier ones first, and tells the peers' compilers what a bare machine has.
# shellcheck shell=bash
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

use_sites() {
    local site paths="$repo:$repo/kernels"
    for site in "$@"; do
        [ -d "$site" ] || { echo "error: no folder $site" >&2; exit 2; }
        site="$(cd "$site" && pwd)"
        paths="$paths:$site"
        # CUTLASS's Python packages come one level down and are found through a .pth file, which PYTHONPATH does not read
        if [ -d "$site/nvidia_cutlass_dsl/dsl_packages" ]; then paths="$paths:$site/nvidia_cutlass_dsl/dsl_packages"; fi
    done
    export PYTHONPATH="$paths${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    export TILELANG_DEFAULT_TARGET="${TILELANG_DEFAULT_TARGET:-{\"kind\":\"cuda\",\"arch\":\"sm_90a\"\}}" # FlashQLA's compiler
    export TILELANG_PRINT_ON_COMPILATION=0
}
