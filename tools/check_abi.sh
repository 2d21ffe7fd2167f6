#!/usr/bin/env bash
# One build, many runtimes: builds a wheel with both libraries in one environment and tests it in
# other environments, each with a different PyTorch. Runs tools/abi_smoke_test.py, then the tests
# that depend most on PyTorch's internals.
#
#   check_abi.sh environments PYTHON FOLDER TORCH...    only create the environments (minutes)
#   check_abi.sh check PYTHON FOLDER TORCH...           create those missing, then build and test
#     PYTHON   the Python of the environment that builds
#     FOLDER   for the wheel and the other environments, each of which takes several GB
#     TORCH    the requirement for pip in each environment, such as torch==2.15.0
#   OTHER_PYTHON, if set, creates the other environments (default: PYTHON): one wheel serves all.
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
what=$1 python=$2 folder=$3
shift 3
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
root=$PWD
tests=(tests/test_{batching,causal_conv1d_update,compile,derivatives,mamba_mixer,operator,s6}.py)
test_needs=(hypothesis numpy 'pytest<9.2' pytest-xdist scipy)

install() {
  local environment=$folder/$1
  [[ ! -e $environment/complete.stamp ]] || return 0
  "${OTHER_PYTHON:-$python}" -m venv --clear "$environment"
  "$environment/bin/python" -m pip install --quiet --no-cache-dir "$1" "${test_needs[@]}"
  touch "$environment/complete.stamp"
}

# Unpacking keeps a core busy for minutes per environment, so they are created in parallel.
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
installs=()
for torch in "$@"; do
  install "$torch" &
  installs+=($!)
done

if [[ $what == check ]]; then
  rm -rf "$folder/wheel"
  USE_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} \
    "$python" -m pip wheel . --no-build-isolation --no-deps --wheel-dir "$folder/wheel"
fi
for process in "${installs[@]}"; do wait "$process"; done
[[ $what == check ]] || exit 0

for torch in "$@"; do
  environment=$folder/$torch
  "$environment/bin/python" -m pip install --quiet --no-deps --force-reinstall "$folder"/wheel/*.whl

  # Not with python -m, which would import the source tree's package instead of the wheel's.
  (cd "$folder" && "$environment/bin/python" "$root/tools/abi_smoke_test.py")
  "$environment/bin/pytest" -q -n auto --dist loadgroup -p no:cacheprovider "${tests[@]}"
  rm -rf "$environment"
done
