#!/usr/bin/env bash
# Uses a release's wheel as a user does: installs it into an environment with PyTorch and nothing
# else, without a compiler on PATH, and computes first gradients. Prints the time that this took.
#
#   check_wheel.sh PYTHON FOLDER TORCH DIST [KIND]
#     PYTHON   the Python that creates the environment
#     FOLDER   for the environment, which is kept for the next run
#     TORCH    the requirement for pip, such as torch==2.13.0
#     DIST     the folder of the wheels, from which the newest one of the kind is taken
#     KIND     cpu (the default), cu12 or cu13
set -euo pipefail
[[ $# -ge 4 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
python=$1 folder=$2 torch=$3 dist=$4 kind=${5:-cpu}
wheel=$(ls -t "$dist"/*+"$kind"-*"$(uname -m)".whl | head -n 1)
mkdir -p "$folder"
environment=$(cd "$folder" && pwd)/environment
if [[ ! -e $environment/complete.stamp ]]; then
  "$python" -m venv --clear "$environment"
  "$environment/bin/python" -m pip install --quiet "$torch"
  touch "$environment/complete.stamp"
fi
"$environment/bin/python" -m pip uninstall --quiet --yes torch-selective-scan

bare=(env --ignore-environment "PATH=$environment/bin" "$environment/bin/python")
root=$PWD start=$SECONDS
"${bare[@]}" -m pip install --no-index "$wheel"
# Run outside the source tree, whose package Python would import instead.
(cd "$folder" && "${bare[@]}" "$root/tools/abi_smoke_test.py")
echo "$wheel: from pip install to gradients of all methods in $((SECONDS - start)) s"
