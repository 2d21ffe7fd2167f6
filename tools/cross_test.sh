#!/usr/bin/env bash
# Compiles the CPU sources for another platform (arm64, Windows) or with another compiler (Clang),
# and runs the tests that need no PyTorch (tests/native_*.cpp), under an emulator if necessary,
# once with each instruction set.
#
#   cross_test.sh arm64|clang|windows FOLDER    compile and run
#   cross_test.sh arm64|clang|windows           print the Debian packages to install, nothing if none
#
# CXX names another compiler, EMULATOR another way to run its programs ("" runs them directly).
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
[[ $(uname) == Linux ]] || { echo "$0 cross-compiles, which needs Linux" >&2 && exit 1; }
case $1 in
  arm64)
    compiler=${CXX:-aarch64-linux-gnu-g++} emulator=${EMULATOR-qemu-aarch64} flags=-O2
    packages="g++-aarch64-linux-gnu qemu-user"
    ;;
  clang)
    compiler=${CXX:-clang++} emulator=${EMULATOR-} flags=-O1
    packages=clang
    ;;
  windows)
    # GCC aligns the stack on 64-bit Windows to 16 bytes, but moves larger vectors with aligned
    # instructions (its bug 54412) unless it is patched, as Debian's is. The assembler's flag fixes
    # that. -O1 compiles the three instruction sets in two thirds of the time of -O2.
    compiler=${CXX:-x86_64-w64-mingw32-g++} emulator=${EMULATOR-wine}
    flags="-O1 -Wa,-muse-unaligned-vector-move"
    packages="g++-mingw-w64-x86-64 wine wine64"
    ;;
  *)
    echo "expected arm64, clang or windows, got '$1'" >&2
    exit 2
    ;;
esac
capabilities=(default)
if [[ $1 != arm64 ]]; then
  if grep -qw avx2 /proc/cpuinfo; then capabilities+=(avx2); fi
  if grep -qw avx512vl /proc/cpuinfo; then capabilities+=(avx512); fi
fi

missing=
for program in $compiler $emulator; do
  command -v "$program" > /dev/null || missing=$packages
done
if [[ $# == 1 ]]; then
  echo "$missing"
  exit
elif [[ -n $missing ]]; then
  echo "$compiler or $emulator was not found; on Debian and Ubuntu: apt install $missing" >&2
  exit 1
fi

folder=$2
mkdir -p "$folder"
mapfile -t sources < <(find csrc/cpu -name '*.cpp' | sort)
sources+=(tests/native_*.cpp)
printf '%s\n' "${sources[@]}" | xargs -P "${MAX_JOBS:-$(nproc)}" -I{} sh -c '
  echo "$1 {}"
  "$1" -std=c++20 -DNDEBUG -Wall -Wextra -Werror $3 -Icsrc -c {} -o "$2/$(echo {} | tr / _).o"
' _ "$compiler" "$folder" "$flags"
objects=()
for source in "${sources[@]}"; do objects+=("$folder/${source//\//_}.o"); done
"$compiler" -static "${objects[@]}" -o "$folder/native_test.exe"
# Wine keeps its files in the build folder and does not ask for add-ons. One server serves all runs:
# by default it exits after each program, and the next program could start while it exits.
if [[ $emulator == wine* ]]; then
  export WINEPREFIX=$PWD/$folder/wine WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml="
  mkdir -p "$WINEPREFIX"
  wineserver --persistent
  trap 'wineserver --kill' EXIT
fi
for capability in "${capabilities[@]}"; do
  status=0
  SELECTIVE_SCAN_CPU_CAPABILITY=$capability $emulator "$folder/native_test.exe" || status=$?
  if [[ $status != 0 ]]; then
    echo "$folder/native_test.exe, capability $capability: status $status" >&2
    exit 1
  fi
done
