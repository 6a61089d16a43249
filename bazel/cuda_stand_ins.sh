#!/usr/bin/env bash
# usage: cuda_stand_ins.sh TORCH_DIR OUT_DIR [LIBRARY_DIR...]
#
# `import torch` loads libtorch_cuda.so, which names a dozen CUDA libraries of
# two gigabytes in all. On a machine without them, a run on the CPU calls none.
# Writes to OUT_DIR an empty stand-in for each that no LIBRARY_DIR holds; its
# functions trap. Only the Python of the tests loads them.
set -euo pipefail
torch=$1 out=$2
shift 2

sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
users=("$torch"/lib/lib*.so)
undefined() { nm -D --undefined-only "${users[@]}" | awk 'NF == 2 {print $2}'; }
undefined | grep -E '^(cu|nccl|nvshmem)' | sort -u >"$sources/symbols"

present() {
  local soname=$1 dir
  shift
  for dir in "$@"; do [ -e "$dir/$soname" ] && return 0; done
  return 1
}

mkdir -p "$out"
for soname in $(readelf -d "${users[@]}" |
    sed -n 's/.*(NEEDED).*\[\(lib\(cu\|nccl\|nvshmem\)[^]]*\)\].*/\1/p' | sort -u); do
  present "$soname" "$@" && continue
  case $soname in
    libcuda.so*) continue ;;  # The driver: LibTorch asks whether it is there.
    libnvshmem*) version=NVSHMEM ;;
    *) version=$soname ;;
  esac
  names=$(sed -n "s/@$version\$//p" "$sources/symbols")
  if [ -n "$names" ]; then
    echo "$version { global: *; };" >"$sources/version"
    script="-Wl,--version-script=$sources/version"
  else  # The library has no symbol versions.
    names=$(grep -v @ "$sources/symbols" || true)
    script=""
  fi
  for name in $names; do
    echo "void $name(void) { __builtin_trap(); }"
  done >"$sources/stand_in.c"
  # shellcheck disable=SC2086
  gcc -shared -fPIC -nostdlib -o "$out/$soname" "$sources/stand_in.c" \
    "-Wl,-soname,$soname" $script
done
