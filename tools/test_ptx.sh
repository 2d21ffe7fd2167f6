#!/usr/bin/env bash
# Runs the CUDA tests on code of an older architecture, on any GPU: the library contains only that
# architecture's PTX, which the driver compiles, and plans are made for a GPU of that architecture.
# The speed is not representative.
#
#   test_ptx.sh PYTHON ARCH FOLDER [ARGUMENT ...]
#     PYTHON    the Python of an environment for the tests, on a machine with nvcc and a GPU
#     ARCH      75, for plans of a T4, or 80, for plans of an A100
#     FOLDER    for the build, and for the driver's cache of compiled code
#     ARGUMENT  arguments for pytest, instead of all GPU tests
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
python=$1 arch=$2 folder=$3
shift 3
case $arch in
  75) facts="multiprocessors=40 block_shared_bytes=65536 shared_bytes=65536" ;;
  80) facts="multiprocessors=108 block_shared_bytes=166912 shared_bytes=167936" ;;
  *)
    echo "expected 75 or 80, got '$arch'" >&2
    exit 2
    ;;
esac
mkdir -p "$folder"
root=$PWD folder=$(cd "$folder" && pwd)
[[ $# -gt 0 ]] || set -- -q -n auto --dist loadgroup -m cuda "$root/tests"

USE_CUDA=1 TORCH_CUDA_ARCH_LIST=${arch:0:1}.${arch:1}-virtual "$python" setup.py build \
  --build-base "$folder/build" --build-lib "$folder/lib"
# Processes share the driver's compiled code if the cache is large enough for all of it.
export CUDA_CACHE_PATH=$folder/cache CUDA_CACHE_MAXSIZE=4294967295
export SELECTIVE_SCAN_CUDA_DEVICE="$facts" PYTHONPATH=$folder/lib
cd "$folder" # where Python finds the package of PYTHONPATH, and not the source tree's
"$python" -c "
import torch, selective_scan
print(selective_scan.backends()['cuda'])
print(torch.ops.selective_scan.cuda_device_facts(0))"
"$python" -m pytest "$@"
