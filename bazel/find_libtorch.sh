#!/usr/bin/env bash
# Prints two lines: the `torch` folder of LibTorch 2.11, and the folder of the
# CUDA runtime that its libtorch_cpu loads (empty for a build without CUDA).
#
# LibTorch is $FULLSHARD_LIBTORCH, else the torch of the python3 on PATH, else
# the pinned wheel, fetched into the cache. The CUDA runtime is the toolkit's
# ($CUDA_HOME or /usr/local/cuda), else what is installed beside LibTorch, else
# the pinned wheels.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

is_libtorch() {
  [ -e "$1/lib/libtorch_cpu.so" ] && [ -e "$1/include/ATen/ATen.h" ] &&
    grep -q "__version__ = '2\.11\." "$1/version.py"
}

torch_of_python() {
  python3 - <<'EOF' 2>/dev/null
from importlib import util
print(util.find_spec("torch").submodule_search_locations[0])
EOF
}

if [ -n "${FULLSHARD_LIBTORCH:-}" ]; then
  torch=$FULLSHARD_LIBTORCH
  if ! is_libtorch "$torch"; then
    echo "FullShard: FULLSHARD_LIBTORCH=$torch: expected the torch folder of" \
      "torch 2.11 with lib/libtorch_cpu.so, include/ and version.py" >&2
    exit 1
  fi
elif torch=$(torch_of_python) && is_libtorch "$torch"; then
  :
else
  torch=$("$here/fetch_wheels.sh" libtorch)/torch
fi
echo "$torch"

if ! readelf -d "$torch/lib/libtorch_cpu.so" | grep -q 'libcudart\.so\.13'; then
  echo
  exit
fi
for folder in "${CUDA_HOME:-/usr/local/cuda}/lib64" "$torch/../nvidia/cu13/lib"; do
  if [ -e "$folder/libcudart.so.13" ] && [ -e "$folder/libcupti.so.13" ]; then
    (cd "$folder" && pwd)
    exit
  fi
done
echo "$("$here/fetch_wheels.sh" cuda_runtime)/nvidia/cu13/lib"
