#!/usr/bin/env bash
# Run gdncp on the GPUs of one host and its peers beside it, unattended and without network, in under 8 minutes from a
# bare machine:
#
#   bash bench/multi_gpu.sh OUT [SITE ...]
#
# OUT gets multi_gpu.json and multi_gpu.md; OUT/parts has a JSON and the traces of each part, OUT/logs its output.  Each
# SITE is a folder of installed packages with peers in it, earlier ones win (as for bench/h200.sh): flash-qla,
# flash-linear-attention, flashinfer-python.  Every part is a process tree with a time limit of its own; one that fails
# is recorded, and the next one runs.
# Environment: PYTHON (python3, one that has torch), WORLD (ranks; the visible GPUs, or 2), BACKEND (nccl where there are
# GPUs; gloo lets ranks share one), PRESET (h200, or tiny without a GPU), PARTS (those to run; the last lines name them),
# TOTAL (seconds for all of it, 470), MAX_TOKENS (of what is timed), COMMIT (what is measured).
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/site.sh" || exit 2
out="${1:?usage: bash bench/multi_gpu.sh OUT [SITE ...]}"
shift
mkdir -p "$out/parts" "$out/logs"
out="$(cd "$out" && pwd)"
begun=$SECONDS

use_sites "$@"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export FLA_FLASH_QLA=0 FLA_TILELANG=0 # FLA runs its own kernels
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 # NVLink multicast stays off
# one host, which need not be able to look up its own name
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"

python="${PYTHON:-python3}"
gpus="$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')" || exit 2
world="${WORLD:-$((gpus > 0 ? gpus : 2))}"
if [ "$gpus" -gt 0 ]; then
    backend="${BACKEND:-nccl}" preset="${PRESET:-h200}" parts="${PARTS:-checks checks_others times peers links killed}"
    if [ "$backend" = gloo ]; then MAX_TOKENS="${MAX_TOKENS:-131072}"; fi # ranks share a GPU's memory
else
    backend="${BACKEND:-gloo}" preset="${PRESET:-tiny}" parts="${PARTS:-checks times peers links killed}"
fi
arguments=(--out "$out" --preset "$preset" --backend "$backend")
[ -z "${MAX_TOKENS:-}" ] || arguments+=(--max-tokens "$MAX_TOKENS")
total="${TOTAL:-470}"
cd "$repo" || exit 2

torchrun() { # SECONDS PART [ARGUMENT ...]: the part on all ranks; nothing new is begun in the last fifteen seconds
    local seconds="$1"
    shift
    timeout --kill-after=10 "$seconds" "$python" -m torch.distributed.run --nnodes=1 --nproc-per-node="$world" \
        --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=127.0.0.1 \
        -m gdncp.bench.multi_gpu "$@" "${arguments[@]}" --budget "$((seconds > 30 ? seconds - 15 : seconds / 2))"
}
begin() { # NAME SECONDS: returns the part's exit code
    if [ "$1" = killed ]; then
        timeout --kill-after=10 "$2" "$python" -m gdncp.bench.multi_gpu killed "${arguments[@]}" --world-size "$world"
    else
        torchrun "$2" "$1"
    fi > >(tee "$out/logs/$1.log" | grep --line-buffered -E "^ *[0-9.]+ s  |^killed") 2> "$out/logs/$1.err"
}
part() { # NAME SECONDS LATER: within its seconds, and such that as many as LATER are left for what comes after
    case " $parts " in *" $1 "*) ;; *) return ;; esac
    local seconds code
    rm -f "$out/parts/$1.json" "$out/parts/$1.rc"
    for _ in 1 2; do # again where it ended at once, before it had anything to write: ranks that did not find each other
        seconds=$((total - (SECONDS - begun) - $3))
        seconds=$((seconds < $2 ? seconds : $2))
        if [ "$seconds" -lt 10 ]; then
            code=124
            echo "error: no time was left" > "$out/logs/$1.err"
            break
        fi
        begin "$1" "$seconds"
        code=$?
        if [ -e "$out/parts/$1.json" ] || [ "$code" -eq 124 ]; then break; fi
    done
    echo "$code" > "$out/parts/$1.rc"
    echo "$1: exit code $code, $((SECONDS - begun)) s so far"
    if [ "$code" -ne 0 ]; then grep -E "Error|error:" "$out/logs/$1.err" | tail -n 5 >&2; fi
}

# peers compile while correctness, which is not timed, is looked at
preparing=()
case " $parts " in *" peers "*)
    if [ "$gpus" -gt 0 ]; then
        for library in flashqla fla; do
            for heads in 16/32 4/8; do
                name="prepare-$library-${heads/\//_}"
                rm -f "$out/parts/$name.json"
                (
                    export FLA_CACHE_RESULTS=0 # choices by time, made side by side with others, are not kept
                    prepare() { torchrun "$1" prepare --library "$library" --heads "$heads"; }
                    prepare 115 || [ -e "$out/parts/$name.json" ] || prepare 100
                ) > "$out/logs/$name.log" 2> "$out/logs/$name.err" &
                preparing+=($!)
            done
        done
    fi ;;
esac
part checks_others 105 0 &
others=$!
part checks 105 0
wait "$others"
for job in ${preparing[@]+"${preparing[@]}"}; do
    wait "$job"
    echo "peers of a kind prepared: exit code $?, $((SECONDS - begun)) s so far"
done
part times 170 160
part peers 200 75
part links 35 55
part killed 85 10
"$python" -m gdncp.bench.multi_gpu merge --out "$out" ${COMMIT:+--commit "$COMMIT"}
code=$?
echo "$((SECONDS - begun)) s in all; exit code $code"
exit "$code"
