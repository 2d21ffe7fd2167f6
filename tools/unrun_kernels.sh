#!/usr/bin/env bash
# Runs the CUDA tests and prints the kernels of the library that none of them launched.
#
#   unrun_kernels.sh PYTHON FOLDER [ARGUMENT ...]
#     PYTHON    the Python of an environment for the tests, with a GPU and the CUDA toolkit
#     FOLDER    for the lists of kernels
#     ARGUMENT  arguments for pytest, instead of all GPU tests
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
python=$1 folder=$2
shift 2
[[ $# -gt 0 ]] || set -- -q -n auto --dist loadgroup -m cuda tests
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -f "$folder"/launched.txt

# Both the CUDA toolkit and PyTorch have CUPTI. PyTorch's copy is used, since a process must not
# load two of them.
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
