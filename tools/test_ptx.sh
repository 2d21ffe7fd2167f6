#!/usr/bin/env bash
# Runs the CUDA tests on code of an older architecture, whatever GPU is there: the library holds its
# PTX alone, which the driver compiles, and plans are made for a GPU of that architecture. Speed
# says nothing here.
#
#   test_ptx.sh PYTHON ARCH FOLDER [ARGUMENT ...]
#     PYTHON    of an environment with what the tests need, on a machine with nvcc and a GPU
#     ARCH      75, of which a T4 is, or 80, of which an A100 is
#     FOLDER    for the build, and for what the driver has compiled
#     ARGUMENT  of pytest, in the place of all tests of a GPU that are not slow
set -euo pipefail
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
[[ $# -gt 0 ]] || set -- -q -n auto --dist loadgroup -m "cuda and not slow" "$root/tests"

USE_CUDA=1 TORCH_CUDA_ARCH_LIST=${arch:0:1}.${arch:1}-virtual "$python" setup.py build \
  --build-base "$folder/build" --build-lib "$folder/lib"
# Processes share what the driver has compiled, if the cache has room for all of it.
export CUDA_CACHE_PATH=$folder/cache CUDA_CACHE_MAXSIZE=4294967295
export SELECTIVE_SCAN_CUDA_DEVICE="$facts" PYTHONPATH=$folder/lib
cd "$folder" # where Python finds the package of PYTHONPATH, and not the source tree's
"$python" -c "
import torch, selective_scan
print(selective_scan.backends()['cuda'])
print(torch.ops.selective_scan.cuda_device_facts(0))"
"$python" -m pytest "$@"
