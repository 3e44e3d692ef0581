#!/usr/bin/env bash
# Run NVIDIA's compute-sanitizer over every kernel of both sets, on small inputs (tests/kernels/sanitized.py):
#
#     launch/sanitize.sh [memcheck|racecheck|initcheck|synccheck ...]      without arguments: the first three
#
# One line per tool says how many errors it found; exit code 1 if any found one, failed, or ran out of time.
# gdncp need not be installed; what is there must have torch, triton and safetensors.  From the environment:
#
#     PYTHON              the interpreter (python3)
#     COMPUTE_SANITIZER   the tool, where it is not on PATH
#     SANITIZE_SECONDS    what each tool may take (600)
#     SANITIZE_CASES      only cases with this in their name, e.g. hopper or "triton bare"
#     SANITIZE_AT_ONCE    1: the tools run side by side, which is quicker where the GPU has the memory
#     SANITIZE_OPTIONS    more options for compute-sanitizer
#     SANITIZE_LOGS       a folder for the full reports (a fresh one)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
sanitizer="${COMPUTE_SANITIZER:-$(PATH="$PATH:/usr/local/cuda/bin" command -v compute-sanitizer)}"
limit="${SANITIZE_SECONDS:-600}"
logs="${SANITIZE_LOGS:-$(mktemp -d)}"
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck racecheck initcheck)
for tool in "${tools[@]}"; do
    case "$tool" in
        memcheck | racecheck | initcheck | synccheck) ;;
        *) echo "sanitize.sh: no tool '$tool': memcheck, racecheck, initcheck or synccheck" >&2; exit 2 ;;
    esac
done
[ -n "$sanitizer" ] || { echo "sanitize.sh: compute-sanitizer not found; set COMPUTE_SANITIZER" >&2; exit 2; }
version="$("$sanitizer" --version 2>&1)"
case "$version" in
    *"Compute Sanitizer"*) ;;
    *) echo "sanitize.sh: COMPUTE_SANITIZER=$sanitizer is not compute-sanitizer; --version says: ${version:-nothing}" >&2; exit 2 ;;
esac

mkdir -p "$logs"
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # else tensors lie in large blocks, and what is past one is inside the block
program=("$python" -m tests.kernels.sanitized "${SANITIZE_CASES:-}")

# Without a tool first: that fills Triton's cache, and what fails by itself is no finding.
if ! "${program[@]}" >"$logs/plain.txt" 2>&1; then
    cat "$logs/plain.txt" >&2
    echo "sanitize.sh: the cases fail without a tool" >&2
    exit 1
fi
grep -h 'not run,' "$logs/plain.txt"

ours=()
while read -r kernel; do ours+=(--kernel-name "kns=$kernel"); done < <("$python" -m tests.kernels.sanitized --kernels)

options() {  # of one tool, into the array `chosen`
    # torch asks for what drivers need not have, so calls that fail by design are not reported
    case "$1" in
        memcheck) chosen=("${ours[@]}" --report-api-errors no --padding 4096) ;;
        initcheck) chosen=(--check-api-memory-access no) ;;  # all kernels: what one that is not watched writes counts as unwritten
        *) chosen=("${ours[@]}") ;;
    esac
}

check() { # TOOL: prints its line, and what it found to stderr; 1 where there is something
    local tool="$1" started=$SECONDS log="$logs/$1.txt" code found verdict chosen
    options "$tool"
    rm -f "$log"
    # shellcheck disable=SC2086  # several options
    timeout --kill-after=20 "$limit" "$sanitizer" --tool "$tool" --target-processes application-only --error-exitcode 9 \
        --log-file "$log" "${chosen[@]}" ${SANITIZE_OPTIONS:-} "${program[@]}" >"$logs/$tool.out.txt" 2>&1
    code=$?
    found="$(grep -o 'SUMMARY: .*' "$log" 2>/dev/null | tail -n 1)"
    verdict="${found#SUMMARY: }"
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        verdict="not done within $limit s"
    elif [ -z "$found" ]; then
        verdict="no summary, exit code $code" code=1
    elif [ "$code" -ne 0 ]; then
        verdict="$verdict, exit code $code"
    elif ! [[ "$verdict" =~ ^0\  ]]; then
        code=1  # hazards that racecheck takes for warnings
    fi
    printf '%-10s %s (%d s)\n' "$tool" "$verdict" $((SECONDS - started))
    [ "$code" -ne 0 ] || return 0
    { head -n 40 "$log"; tail -n 10 "$logs/$tool.out.txt"; } >&2 2>/dev/null
    return 1
}

failed=0 running=()
for tool in "${tools[@]}"; do
    if [ "${SANITIZE_AT_ONCE:-0}" = 1 ]; then
        check "$tool" &
        running+=($!)
    else
        check "$tool" || failed=1
    fi
done
for job in ${running[@]+"${running[@]}"}; do wait "$job" || failed=1; done
echo "reports: $logs"
exit "$failed"
