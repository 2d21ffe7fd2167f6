#!/usr/bin/env bash
# Compiles one source of each folder of CUDA kernels with CUDA 12's nvcc, whichever CUDA is used
# otherwise, since its front end supports less of C++20 than CUDA 13's. Two sources are also
# compiled for Turing. Nothing is linked or run.
#
#   cuda12.sh toolkit PYTHON FOLDER    find such an nvcc, or fail with a message
#   cuda12.sh compile PYTHON FOLDER    find it and compile
#
#   CUDA12_HOME, if set, names a toolkit of CUDA 12. Otherwise one is assembled in FOLDER, since no
#   registry has all parts: the headers come from PyPI, the compiler from Debian 13, whose package
#   apt downloads without installing it.
set -euo pipefail
[[ $# -ge 3 ]] || { sed -n 's/^#   //p' "$0" >&2 && exit 2; }
cd "$(dirname "$0")/.."
package=nvidia-cuda-toolkit suite=trixie component=non-free
headers=(nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-cccl-cu12==12.6.77)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# Prints the mirror of this system's own packages.
mirror() {
  [[ -e $keyring ]] && command -v apt-get > /dev/null &&
    apt-get indextargets --format '$(SITE)' 'Origin: Debian' 'Created-By: Packages' | head -n 1
}

python=$2 folder=$3
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# Downloads the package from another release than this system's, with separate lists and settings.
download() {
  local sources=$folder/apt/sources.list.d
  mkdir -p "$sources" "$folder/apt/lists/partial" "$folder/apt/archives/partial"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\nSigned-By: %s\n' \
    "$(mirror)" "$suite" "$component" "$keyring" > "$sources/debian.sources"
  local apt=(apt-get -qq -o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$sources"
    -o "Dir::State::lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt" -o "APT::Sandbox::User=$(id -un)")
  "${apt[@]}" update
  (cd "$folder" && "${apt[@]}" download "$package")
}

if [[ -n ${CUDA12_HOME:-} ]]; then
  home=$CUDA12_HOME
elif [[ -z $(mirror) ]]; then
  echo "CUDA12_HOME names no toolkit of CUDA 12, and this is not Debian, which has its compiler" >&2
  exit 1
else
  home=$folder/toolkit
  if [[ ! -e $home/complete.stamp ]]; then
    rm -rf "$home" "$folder/parts"
    download
    dpkg-deb -x "$folder/${package}"_*.deb "$folder/parts"
    rm "$folder/${package}"_*.deb
    "$python" -m pip install --quiet --no-deps --target "$folder/parts" "${headers[@]}"
    mkdir -p "$home/bin" "$home/nvvm/bin" "$home/include"
    parts=$folder/parts/usr
    cp -r "$parts/lib/$package"/bin/{nvcc,crt} "$parts"/bin/{cudafe++,fatbinary,ptxas} "$home/bin"
    cp "$parts/lib/$package/bin/cicc" "$home/nvvm/bin"
    cp -r "$parts/lib/$package/libdevice" "$home/nvvm"
    for part in cuda_nvcc cuda_runtime cuda_cccl; do
      cp -r "$folder/parts/nvidia/$part/include/." "$home/include"
    done
    cat > "$home/bin/nvcc.profile" <<- 'END'
	TOP = $(_HERE_)/..
	NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
	PATH += $(TOP)/nvvm/bin:$(_HERE_):
	INCLUDES += "-I$(TOP)/include" $(_SPACE_)
	END
    rm -rf "$folder/parts" "$folder/apt"
    touch "$home/complete.stamp"
  fi
fi
"$home/bin/nvcc" --version | grep 'release 12\.'
[[ $1 == compile ]] || exit 0

# Of the sources that exist for each method only zoh's is compiled, and of the element types only
# bfloat16, since the others are further instances of the same templates. The code is never run, so
# it is compiled with little optimization.
"$python" - "$folder/zoh" << 'END'
import sys
from pathlib import Path
sys.path.insert(0, "csrc/cuda")
import instantiations
instantiations.write(Path(sys.argv[1]), ["zoh"])
END
sed -i -E '/<(float|Half)[,>]/d' "$folder"/zoh/{dstate1_long,dstate1_wide,narrow,prompt}.cu
sources=(
  csrc/cuda/conv/forward.cu csrc/cuda/diagonal/backward.cu "$folder/zoh/dstate1_long.cu" "$folder/zoh/dstate1_wide.cu"
  "$folder/zoh/narrow.cu" "$folder/zoh/floor_float.cu" csrc/cuda/kit/segments.cu csrc/cuda/launch.cu
  csrc/cuda/matrix/forward.cu csrc/cuda/norm/norm.cu csrc/cuda/kit/launch_tools.cu
  csrc/cuda/prefill/prefill.cu
  "$folder/zoh/prompt.cu" "$folder/zoh/streamed_forward_complex_float_2x8.cu"
  csrc/cuda/step/launch.cu csrc/cuda/sums/gradient_sums.cu csrc/cuda/unitary/forward.cu
  csrc/cuda/update/launch.cu "$folder/zoh/update_float.cu"
)
for path in csrc/cuda/*/; do
  compgen -G "$path*.cu" > /dev/null || continue  # headers alone
  name=$(basename "$path")
  [[ " ${sources[*]}" == *"/$name"[/_.]* ]] ||
    { echo "no source of $path is among those that are compiled here" >&2; exit 1; }
done
# Turing has fewer instructions than later GPUs, and no other test here compiles for it.
turing=("$folder/zoh/dstate1_long.cu" "$folder/zoh/floor_float.cu")
{
  printf '90\0%s\0' "${sources[@]}"
  printf '75\0%s\0' "${turing[@]}"
} | xargs -0 -n 2 -P "${MAX_JOBS:-$(nproc)}" sh -c '
  echo "$1 $4 for sm_$3"
  "$1" -std=c++20 --expt-relaxed-constexpr -Xcicc -O1 -Xptxas -O0 -DNDEBUG -Icsrc -gencode="arch=compute_$3,code=sm_$3" \
    -Xcompiler=-Wall,-Wextra -c "$4" -o "$2/$(echo "$3_$4" | tr / _).o"
' _ "$home/bin/nvcc" "$folder"
