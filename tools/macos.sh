#!/usr/bin/env bash
# Compiles the CPU library for macOS on Apple processors, with warnings as errors, and links it with
# PyTorch's libraries for macOS, which must provide every symbol it needs. Nothing is run.
#
#   macos.sh parts PYTHON FOLDER      download the required parts to FOLDER, or fail with a message
#   macos.sh compile PYTHON FOLDER    do so and compile; PYTHON must have PyTorch
#
# The compiler is the Clang of PyPI's ziglang, which includes libc++ and Apple's headers. PyTorch's
# headers and libraries come from its wheel for macOS.
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
[[ $(uname) == Linux ]] || { echo "$0 cross-compiles, which needs Linux" >&2 && exit 1; }
python=$2 folder=$3
torch=torch==2.10.0 # the oldest that is supported
zig=ziglang==0.17.1
target=aarch64-macos.11.0

if [[ ! -e $folder/parts.stamp ]]; then
  rm -rf "$folder"
  "$python" -m pip install --quiet --no-deps --target "$folder/zig" "$zig"
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --platform macosx_11_0_arm64 --dest "$folder/wheel" "$torch"
  "$python" - "$folder" << 'END'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
[wheel] = (folder / "wheel").glob("torch-*.whl")
with zipfile.ZipFile(wheel) as archive:
    parts = ("torch/include/", "torch/lib/libtorch", "torch/lib/libc10")
    archive.extractall(folder, [name for name in archive.namelist() if name.startswith(parts)])
END
  rm -r "$folder/wheel"
  touch "$folder/parts.stamp"
fi
[[ $1 == compile ]] || exit 0

"$python" - "$folder/tables" << 'END'
import sys
from pathlib import Path

sys.path.insert(0, "csrc/torch")
import argument_tables

argument_tables.write(Path(sys.argv[1]))
END
mapfile -t sources < <(find csrc/cpu csrc/torch -name '*.cpp' -not -name '*_cuda.cpp' | sort)
# The code is never run, so it is compiled without optimization.
printf '%s\n' "${sources[@]}" | PYTHONPATH=$folder/zig xargs -P "${MAX_JOBS:-$(nproc)}" -I{} sh -c '
  echo "clang for macOS: {}"
  "$1" -m ziglang c++ -target "$3" -std=c++20 -O0 -DNDEBUG -fvisibility=hidden -Wall -Wextra -Werror \
    -DTORCH_TARGET_VERSION=0x020a000000000000 -DSELECTIVE_SCAN_VERSION=\"none\" -Icsrc -I"$2/tables" \
    -isystem "$2/torch/include" -isystem "$2/torch/include/torch/csrc/api/include" \
    -c {} -o "$2/$(echo {} | tr / _).o"
' _ "$python" "$folder" "$target"
objects=()
for source in "${sources[@]}"; do objects+=("$folder/${source//\//_}.o"); done
PYTHONPATH=$folder/zig "$python" -m ziglang c++ -target "$target" -shared "${objects[@]}" \
  -L"$folder/torch/lib" -ltorch -ltorch_cpu -lc10 -o "$folder/_cpu.so"
echo "linked with $torch for macOS: $(stat -c %s "$folder/_cpu.so") bytes"
