#!/usr/bin/env bash
# What a user does with a release's wheel: installs it into an environment that has PyTorch and
# nothing else, with no compiler on PATH, and takes a first gradient. Says how long that took.
#
#   check_wheel.sh PYTHON FOLDER TORCH DIST [KIND]
#     PYTHON   makes the environment
#     FOLDER   for the environment, which is kept for the next run
#     TORCH    what pip installs into it, such as torch==2.13.0
#     DIST     the folder of the wheels, of which the newest one of the kind is taken
#     KIND     cpu, which is what is taken without it, cu12 or cu13
set -euo pipefail
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
# Not from the source tree, whose package Python would import instead.
(cd "$folder" && "${bare[@]}" "$root/tools/abi_smoke_test.py")
echo "$wheel: from pip install to gradients of all methods in $((SECONDS - start)) s"
