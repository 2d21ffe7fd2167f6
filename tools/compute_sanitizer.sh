#!/usr/bin/env bash
# Runs tests/sanitizer_workload.py under compute-sanitizer, once with each tool.
#
#   compute_sanitizer.sh PYTHON [TOOL ...]      default: memcheck racecheck initcheck synccheck
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
python=$1
shift
tools=("$@")
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck initcheck synccheck)

sanitizer=$(command -v compute-sanitizer || true)
for folder in "${CUDA_HOME:-}" /usr/local/cuda /opt/cuda; do
  [[ -n "$sanitizer" ]] || sanitizer=$(command -v "$folder/bin/compute-sanitizer" || true)
done
if [[ -z "$sanitizer" ]]; then
  echo "compute-sanitizer was not found on PATH or in CUDA_HOME; it comes with the CUDA toolkit" >&2
  exit 1
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "compute-sanitizer needs a GPU, and torch sees none" >&2
  exit 1
}

# Without PyTorch's caching allocator every tensor is a separate allocation, so that accesses out of
# bounds are detected.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
for tool in "${tools[@]}"; do
  options=(--tool "$tool" --error-exitcode 1 --launch-timeout 300)
  # The number of barriers in a block, which these two tools underestimate if PTX initializes them.
  [[ "$tool" != racecheck && "$tool" != synccheck ]] || options+=(--num-cuda-barriers 65536)
  echo "== compute-sanitizer ${options[*]}"
  "$sanitizer" "${options[@]}" "$python" tests/sanitizer_workload.py
done
