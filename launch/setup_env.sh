# Sourced by the scripts beside it.  `setup_env EXTRA` makes .venv in the repository with gdncp[EXTRA] installed and puts
# it first on PATH.  Quick where that is done already; no root rights needed.
#
# What is downloaded, and from where, follows pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf, ...).
# Without a GPU, torch's smaller CPU build does as well: point those settings at an index that has it to save gigabytes.

TORCH_WITHOUT_GPU="torch==2.13.0"
TORCH_WITH_GPU="torch>=2.8"

repo_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

num_gpus() {  # GPUs that the driver shows; CUDA_VISIBLE_DEVICES is torch's business
    if command -v nvidia-smi >/dev/null 2>&1; then nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true; else echo 0; fi
}

# Whether the given Python already has a torch that is new enough and sees a GPU: then it is used, not downloaded again.
has_cuda_torch() {
    "$1" - >/dev/null 2>&1 <<'PY'
import sys, torch
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(0 if version >= (2, 8) and torch.cuda.is_available() else 1)
PY
}

setup_env() {
    local extra="$1" venv="$repo_dir/.venv" python="${PYTHON:-python3}"
    local stamp="$venv/.gdncp-$extra"
    # "dev" holds all that "cli" does
    if ! cmp -s "$stamp" "$repo_dir/pyproject.toml" && ! cmp -s "$venv/.gdncp-dev" "$repo_dir/pyproject.toml"; then
        command -v "$python" >/dev/null || die "$python not found; set PYTHON to a Python >= 3.10"
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$("$python" --version) is too old: 3.10 or newer is needed"
        if [ ! -x "$venv/bin/python" ]; then
            say "Making $venv"
            local -a options=()
            if has_cuda_torch "$python"; then options=(--system-site-packages); fi
            "$python" -m venv "${options[@]}" "$venv" || die "could not make a virtual environment (on Debian: apt install python3-venv)"
        fi
        if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
            local torch="$TORCH_WITHOUT_GPU"
            if [ "$(num_gpus)" -gt 0 ]; then torch="$TORCH_WITH_GPU"; fi
            say "Installing $torch"
            "$venv/bin/python" -m pip install --quiet "$torch"
        fi
        say "Installing gdncp[$extra]"
        "$venv/bin/python" -m pip install --quiet --editable "$repo_dir[$extra]"
        cp "$repo_dir/pyproject.toml" "$stamp"  # last: only a finished set-up counts
    fi
    export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
}
