#!/usr/bin/env bash
# usage: fetch_wheels.sh NAME
#
# Unpacks the wheels of requirements/NAME.txt, checked against the hashes in it,
# into the cache and prints the folder. A folder that is there is complete.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cache=${FULLSHARD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fullshard}
requirements=$here/requirements/$1.txt

checksum=$(sha256sum "$requirements")
folder=$cache/$1-${checksum:0:12}
if [ ! -d "$folder" ]; then
  python=
  for candidate in /usr/bin/python3 python3; do
    if "$candidate" -m pip --version >/dev/null 2>&1; then
      python=$candidate
      break
    fi
  done
  if [ -z "$python" ]; then
    echo "FullShard: fetching $1 needs python3 with pip" >&2
    exit 1
  fi
  echo "FullShard: unpacking $(sed -n 's/ \\$//p' "$requirements" | paste -sd' ')" \
    "into $folder" >&2
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  partial=$folder.partial
  rm -rf "$partial"
  # pip unpacks beside the target first; the cache has the room.
  mkdir -p "$partial/tmp"
  # The wheels are Debian 12's Python's, whichever Python runs pip.
  [ -d "$folder" ] || TMPDIR=$partial/tmp PIP_USER=0 "$python" -m pip install \
    --quiet --no-cache-dir --no-deps --no-compile --require-hashes \
    --only-binary=:all: --implementation cp --python-version 3.11 \
    --abi cp311 --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_25_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 \
    --root-user-action=ignore --disable-pip-version-check \
    --target "$partial/site" --requirement "$requirements" >&2
  [ -d "$folder" ] || mv "$partial/site" "$folder"
  rm -rf "$partial"
fi
echo "$folder"
