#!/usr/bin/env bash
# Builds the CPU library with AddressSanitizer and UBSan in a separate folder, and runs tests on it.
#
#   asan.sh PYTHON FOLDER [PYTEST ARGUMENT ...]
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") folder=$2
shift 2

SELECTIVE_SCAN_SANITIZE=1 "$python" setup.py build --build-base "$folder" --build-lib "$folder/lib"

# Python itself is not instrumented, so the sanitizer's runtime library must be loaded first. Leaks
# are not reported, since the interpreter keeps memory until it exits.
compiler=${CXX:-c++}
export LD_PRELOAD="$("$compiler" -print-file-name=libasan.so):$("$compiler" -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:${ASAN_OPTIONS:-}
export UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-}
# The build must precede the source tree on the module path. pytest is therefore called by its
# script, since python -m would put the current folder first.
export PYTHONPATH=$PWD/$folder/lib
(cd "$folder" && "$python" -c '
import selective_scan, sys
print("testing", selective_scan.__file__)
sys.exit("it is not the sanitizer build" if sys.argv[1] not in selective_scan.__file__ else 0)
' "$folder/lib")
# --capture=sys: a sanitizer writes its report to the file descriptor and ends the process.
"$(dirname "$python")/pytest" --capture=sys -p no:cacheprovider "$@"
