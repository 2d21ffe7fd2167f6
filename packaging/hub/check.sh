#!/usr/bin/env bash
# Checks packaging/hub as far as possible without Nix and without a hub: `kernels` reads build.toml
# and loads two CPU builds into one process, and its tests pass with one of them.
#
#   check.sh PYTHON FOLDER
#     PYTHON   the Python (3.11 or later) of an environment with torch, ninja and pytest
#     FOLDER   for the builds, and for the package `kernels`, which is kept out of the environment
#   CXXFLAGS=-DSELECTIVE_SCAN_METHOD_BITS=1 builds only the first method, in less time.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
python=$1 folder=$2
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
[[ -e $folder/packages/kernels ]] ||
  "$python" -m pip install --quiet --target "$folder/packages" kernels==0.17.2
export PYTHONPATH=$folder/packages PATH=$(dirname "$python"):$PATH

"$python" packaging/hub/make.py "$folder/made"
"$python" -c 'import sys; from kernels._rust import Build; print(Build.open(sys.argv[1]).general)' \
  "$folder/made"
"$python" packaging/hub/build_locally.py "$folder/made" "$folder/builds" one two
# Run outside the source tree, so that its package is not imported.
cd "$folder"
"$python" "$root/packaging/hub/check.py" builds/one builds/two
LOCAL_KERNELS=kernels-community/selective-scan=$folder/builds/one \
  "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir made -W ignore made/tests
