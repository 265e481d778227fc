#!/bin/sh
# The main job on a small generated checkpoint: HF -> DCP -> HF, with packed and with decoded experts.
set -eu
out=${1:-demo-output}
rm -rf "$out"
mkdir -p "$out"

run() {
    printf '\n$ k3convert %s\n' "$*"
    k3convert "$@"
}

run make-tiny "$out/k3"
run hf-to-dcp "$out/k3" "$out/packed"
run dcp-to-hf "$out/packed" "$out/from-packed"
run hf-to-dcp "$out/k3" "$out/bf16" --experts bf16
run dcp-to-hf "$out/bf16" "$out/from-bf16"
run verify "$out/packed" --against "$out/from-bf16"

echo
status=0
for copy in from-packed from-bf16; do
    diff -r "$out/k3" "$out/$copy" || status=1
    for file in $(cd "$out/k3" && find . -type f | sort); do
        if cmp -s "$out/k3/$file" "$out/$copy/$file"; then
            echo "identical  $copy/${file#./}"
        else
            echo "DIFFERENT  $copy/${file#./}"
            status=1
        fi
    done
done
exit $status
