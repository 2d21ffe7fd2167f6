#!/usr/bin/env bash
# One build, many runtimes: builds a wheel with both libraries in one environment and loads it in a
# second one that has another PyTorch (tools/abi_smoke_test.py).
#
#   check_abi.sh PYTHON TORCH FOLDER
#     PYTHON   of the environment that builds
#     TORCH    what pip installs into the second environment, such as torch==2.14.1
#     FOLDER   for the wheel and the second environment; the environment is kept for the next run
#   OTHER_PYTHON, when set, makes the second environment (default: PYTHON): the wheel is for all.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 torch=$2 folder=$3
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
smoke_test=$PWD/tools/abi_smoke_test.py

rm -rf "$folder/wheel"
USE_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} \
  "$python" -m pip wheel . --no-build-isolation --no-deps --wheel-dir "$folder/wheel"

environment=$folder/environment
if [[ "$(cat "$environment/torch.stamp" 2> /dev/null)" != "$torch" ]]; then
  "${OTHER_PYTHON:-$python}" -m venv --clear "$environment"
  "$environment/bin/python" -m pip install --quiet "$torch"
  echo "$torch" > "$environment/torch.stamp"
fi
"$environment/bin/python" -m pip install --quiet --no-deps --force-reinstall "$folder"/wheel/*.whl

# Away from the source tree, whose package would be imported instead of the wheel's.
cd "$folder"
"$environment/bin/python" "$smoke_test"
