#!/bin/sh
# The three jobs on a small generated checkpoint: HF -> DCP -> HF with packed and with decoded experts, a few cells of
# the parity matrix, and ten training steps.
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

run make-tiny "$out/short" --num-layers 5 --num-experts 8
run verify-parity "$out/short" --cell sp=2,ep=2,dtype=fp32,data=packed --cell pp=2,dtype=fp32 --cell impl.attn=sdpa,dtype=bf16 \
    --report "$out/parity" || status=1
run smoke-train tiny_cpu --steps 10 --out "$out/train" \
    --set model.generate.num_layers=4 --set saving.every=5 --set expect.fall=0.1 || status=1
exit $status
