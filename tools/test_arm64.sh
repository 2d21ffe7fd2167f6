#!/usr/bin/env bash
# Cross-compiles the CPU sources for 64-bit ARM, and runs the tests that need no PyTorch
# (tests/native_test.cpp) under an emulator.
#
#   test_arm64.sh FOLDER
#
# Needs a cross-compiler and qemu's user mode; on Debian and Ubuntu g++-aarch64-linux-gnu and
# qemu-user. CXX names another compiler, EMULATOR another way to run its programs ("" runs them
# as they are).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
compiler=${CXX:-aarch64-linux-gnu-g++}
emulator=${EMULATOR-qemu-aarch64}
for program in $compiler $emulator; do
  command -v "$program" > /dev/null || {
    echo "$program was not found; on Debian and Ubuntu: apt install g++-aarch64-linux-gnu qemu-user"
    exit 1
  } >&2
done

mkdir -p "$folder"
mapfile -t sources < <(find csrc/cpu -name '*.cpp' | sort)
sources+=(tests/native_test.cpp)
printf '%s\n' "${sources[@]}" | xargs -P "${MAX_JOBS:-$(nproc)}" -I{} sh -c '
  echo "$1 {}"
  "$1" -std=c++20 -O2 -DNDEBUG -Wall -Wextra -Werror -Icsrc -c {} -o "$2/$(echo {} | tr / _).o"
' _ "$compiler" "$folder"
objects=()
for source in "${sources[@]}"; do objects+=("$folder/${source//\//_}.o"); done
"$compiler" -static "${objects[@]}" -o "$folder/native_test"
$emulator "$folder/native_test"
