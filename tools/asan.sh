#!/usr/bin/env bash
# Builds the CPU library with AddressSanitizer and UBSan in a folder of its own, and runs tests on it.
#
#   asan.sh PYTHON FOLDER [PYTEST ARGUMENT ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 folder=$2
shift 2

SELECTIVE_SCAN_SANITIZE=1 "$python" setup.py build --build-base "$folder" --build-lib "$folder/lib"

# Python itself is not instrumented, so the sanitizer's run-time library has to be loaded first.
# Leaks are not reported: the interpreter keeps memory until it exits.
compiler=${CXX:-c++}
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so):$("$compiler" -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:${ASAN_OPTIONS:-}
export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-}
export PYTHONPATH=$PWD/$folder/lib PYTHONSAFEPATH=1
"$python" -c '
import selective_scan, sys
print("testing", selective_scan.__file__)
sys.exit("the sanitizer build is not the one imported" if sys.argv[1] not in selective_scan.__file__ else 0)
' "$folder"
# --capture=sys: a sanitizer writes its report to the file descriptor and ends the process.
"$python" -m pytest --capture=sys -p no:cacheprovider "$@"
