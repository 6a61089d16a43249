#!/usr/bin/env bash
# usage: setup.sh [--with-tests]
#
# Sets up what a build needs and this machine lacks: Debian packages, LibTorch,
# and with --with-tests the Python of interchange tests. Writes
# .fullshard.bazelrc, so that plain `bazel` finds the same things.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
workspace=$(dirname "$here")
cache=${FULLSHARD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fullshard}
rc=$workspace/.fullshard.bazelrc
with_tests=${1:-}

say() { echo "FullShard: $*" >&2; }

missing_packages() {
  local package
  while read -r package; do
    case $installed in
      *" $package "*) ;;
      *) echo "$package" ;;
    esac
  done <"$here/debian_packages.txt"
}

install_packages() {
  local installed missing
  if ! command -v dpkg-query >/dev/null; then
    say "expected Debian 12 (dpkg-query not found); needed packages:" \
      "$(paste -sd' ' "$here/debian_packages.txt")"
    exit 1
  fi
  # dpkg-query fails if one of the packages was never heard of.
  # shellcheck disable=SC2046
  installed=" $({ dpkg-query -W -f '${db:Status-Status} ${Package}\n' \
    $(cat "$here/debian_packages.txt") 2>/dev/null || true; } |
    sed -n 's/^installed //p' | paste -sd' ') "
  missing=$(missing_packages | paste -sd' ')
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    say "this machine lacks Debian packages. Run this line, then call again:"
    echo "sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing"
    exit 1
  fi
  say "installing Debian packages: $missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2
  # shellcheck disable=SC2086
  apt-get install -y -qq --no-install-recommends $missing </dev/null >&2
}

# What the generated file depends on.
fingerprint() {
  {
    cat "$here"/*.sh "$here"/requirements/*.txt
    echo "$cache" "${FULLSHARD_LIBTORCH:-}" "${CUDA_HOME:-}" \
      "$(command -v python3)"
    ls -d "${CUDA_HOME:-/usr/local/cuda}/lib64" 2>/dev/null || true
  } | sha256sum | cut -c1-16
}

# A Python 3.11 that imports the same LibTorch; prints nothing else.
write_test_python() {
  local torch=$1 cuda_runtime=$2 packages stand_ins libraries path
  packages=$("$here/fetch_wheels.sh" interchange)
  if ! compgen -G "$torch/_C.cpython-311-*" >/dev/null; then
    torch=$("$here/fetch_wheels.sh" libtorch)/torch
  fi
  stand_ins=$cache/cuda-stand-ins-$key
  libraries=$cuda_runtime
  if [ -n "$cuda_runtime" ]; then
    rm -rf "$stand_ins"
    "$here/cuda_stand_ins.sh" "$torch" "$stand_ins" "$cuda_runtime" \
      "$torch"/../nvidia/*/lib
    libraries=$cuda_runtime:$stand_ins
  fi
  path=$packages:$(dirname "$torch")
  test_python=$cache/test-python-$key
  cat >"$test_python.partial" <<EOF
#!/bin/sh
export LD_LIBRARY_PATH='$libraries'
export PYTHONPATH='$path'"\${PYTHONPATH:+:\$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 "\$@"
EOF
  chmod +x "$test_python.partial"
  mv "$test_python.partial" "$test_python"
  test_pythonpath=$path
}

write_rc() {
  local found torch cuda_runtime checkpoints
  found=$("$here/find_libtorch.sh")
  torch=$(sed -n 1p <<<"$found")
  cuda_runtime=$(sed -n 2p <<<"$found")
  {
    echo "# Written by bazelw; fingerprint $key $with_tests"
    echo "build --repo_env=FULLSHARD_LIBTORCH=$torch"
    echo "build --disk_cache=$cache/bazel"
    if [ "$with_tests" ]; then
      write_test_python "$torch" "$cuda_runtime"
      checkpoints=$("$here/fetch_wheels.sh" checkpoints)
      echo "test --test_env=FULLSHARD_TEST_PYTHON=$test_python"
      echo "test --test_env=FULLSHARD_TEST_PYTHONPATH=$test_pythonpath"
      echo "test --test_env=FULLSHARD_TEST_CHECKPOINTS=$checkpoints"
    fi
  } >"$rc.partial"
  mv "$rc.partial" "$rc"
}

install_packages
key=$(fingerprint)
written=$(sed -n '1s/.*fingerprint //p' "$rc" 2>/dev/null || true)
torch=$(sed -n 's/.*FULLSHARD_LIBTORCH=//p' "$rc" 2>/dev/null || true)
case $written in
  *--with-tests) with_tests=--with-tests ;;  # Plain `bazel test` goes on.
esac
if [ ! -e "$torch/lib/libtorch_cpu.so" ]; then
  written=
fi
[ "$written" = "$key $with_tests" ] || write_rc
