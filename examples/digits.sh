#!/usr/bin/env bash
# The main job from the command line: compile the digits example, train it, print its accuracy.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-runs/digits}
mkdir -p "$folder"
python examples/digits_data.py "$folder"
fixstep compile examples.digits:program --target cpu:host -o "$folder/digits.fixstep"
rm -rf "$folder/checkpoints" "$folder/metrics.csv"
fixstep run "$folder/digits.fixstep" --data "$folder/digits-train.npz" --validate "$folder/digits-test.npz" \
    --epochs 20 --checkpoint-dir "$folder/checkpoints" --log "$folder/metrics.csv"
