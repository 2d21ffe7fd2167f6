#!/usr/bin/env bash
# Runs the CUDA tests and prints the kernels of the library that none of them launched.
#
#   unrun_kernels.sh PYTHON FOLDER [ARGUMENT ...]
#     PYTHON    of an environment with what the tests need, on a machine with a GPU and CUDA's toolkit
#     FOLDER    for what has been launched
#     ARGUMENT  of pytest, in the place of all tests of a GPU that are not slow
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 folder=$2
shift 2
[[ $# -gt 0 ]] || set -- -q -n auto --dist loadgroup -m "cuda and not slow" tests
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -f "$folder"/launched.txt

# CUPTI comes with CUDA's toolkit, and with PyTorch, whose copy a process must not have beside another.
home=${CUDA_HOME:-/usr/local/cuda}
cupti=$("$python" -c '
import pathlib, sys
print(next(p for f in sys.path for p in pathlib.Path(f).glob("nvidia/*/lib/libcupti.so.*")))')
"${CXX:-c++}" -std=c++20 -O2 -Wall -Wextra -shared -fPIC -I"$home/include" \
  -I"$home/extras/CUPTI/include" -o "$folder/launched_kernels.so" tools/launched_kernels.cpp "$cupti"

rc=0
CUDA_INJECTION64_PATH=$folder/launched_kernels.so LAUNCHED_KERNELS=$folder/launched.txt \
  LD_LIBRARY_PATH=$(dirname "$cupti")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
  "$python" -m pytest "$@" || rc=$?

cuobjdump=$(command -v cuobjdump || echo "$home/bin/cuobjdump")
"$cuobjdump" -symbols selective_scan/_cuda*.so |
  sed -n 's/.*STO_ENTRY *//p' | sort -u > "$folder/kernels.txt"
sort -u "$folder/launched.txt" | comm -23 "$folder/kernels.txt" - > "$folder/unrun.txt"
c++filt < "$folder/unrun.txt"
echo "$(wc -l < "$folder/unrun.txt") of $(wc -l < "$folder/kernels.txt") kernels were not launched" >&2
exit "$rc"
