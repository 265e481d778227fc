#!/bin/sh
# Checks that need a CUDA device, in stages of limited time, the most telling first:
#
#     tools/gpu_check.sh FOLDER
#
# Writes FOLDER/<stage>.log for every stage and FOLDER/measurements.jsonl, one JSON line a measurement, and ends with a
# summary (FOLDER/summary.txt). At most 560 s. Exit code 0: every stage passed, 1: one did not, 3: no CUDA device. PYTHON names the interpreter, which has
# the package's requirements, pytest, pytest-timeout, pytest-xdist, and for the fla rows flash-linear-attention.
# Kernels take the first configuration that runs; K3_GPU_AUTOTUNE=full tunes them, which takes far longer.
set -u
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1" || exit 2
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-python3}
tests=tests/k3kernels/gpu
failed=0
export PYTHONUNBUFFERED=1
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD/model:$PWD/kernels:$PWD"
export K3_GPU_MEASUREMENTS="$folder/measurements.jsonl"
: >"$K3_GPU_MEASUREMENTS"
: >"$folder/summary.txt"

say() {
    echo "$*" | tee -a "$folder/summary.txt"
}

# stage NAME SECONDS PYTEST_ARGUMENTS...
stage() {
    name=$1 limit=$2
    shift 2
    started=$(date +%s)
    timeout -s INT -k 5 "$limit" "$python" -m pytest -m gpu -p no:cacheprovider --durations=8 "$@" >"$folder/$name.log" 2>&1
    code=$?
    [ "$code" -eq 0 ] || failed=1
    say "$name: exit $code after $(($(date +%s) - started)) s of $limit: $(tail -n 1 "$folder/$name.log" | tr -d '=')"
}

probe() {
    timeout -k 5 "$1" "$python" -c 'import torch; torch.empty(1 << 30, device="cuda")' >"$folder/probe.log" 2>&1
}

# Segments that grow leave no gaps between 20 GB blocks, where the driver can map memory so.
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
if ! probe 30; then
    unset PYTORCH_CUDA_ALLOC_CONF
    probe 20 || { say "no CUDA device: $(tail -n 1 "$folder/probe.log")"; exit 3; }
    say "segments that grow do not work here: fixed ones are used"
fi

stage layers-64 140 -v "$tests/test_layers.py" -k 64
stage layers-896 110 -v "$tests" -k 896
stage layer-sizes 125 -v "$tests/test_rows.py" -k layer_size
stage small-sizes 110 -n 6 --dist loadgroup "$tests/test_rows.py" -k "not layer_size and not 896"

say "$(wc -l <"$K3_GPU_MEASUREMENTS") measurements in $K3_GPU_MEASUREMENTS"
grep -hE '^(FAILED|ERROR|SKIPPED)' "$folder"/*.log | cut -c 1-300 | tee -a "$folder/summary.txt"
exit "$failed"
