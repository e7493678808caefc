#!/usr/bin/env bash
# Prints the path of uv; installs it from the Python package index first when this machine has none.
#
#   tools/find-uv.sh [PYTHON]
#
# It goes to a folder of its own under the cache folder: no other environment changes, and a Python
# that its distribution manages (Debian's) is left alone. Needs `python3-venv` or `python3-pip`.
set -euo pipefail

python=${1:-python3}
folder=${KVOY_HOME:-$HOME/.cache/kvoy}/tools/uv

if command -v uv; then
  exit 0
fi
for uv in "$folder/bin/uv" "$folder/venv/bin/uv"; do
  if [ -x "$uv" ]; then
    echo "$uv"
    exit 0
  fi
done
if ! command -v "$python" > /dev/null; then
  echo "Kvoy needs Python 3.11 or newer; there is no '$python' here (Debian: apt install python3)" >&2
  exit 1
fi

echo "installing uv into $folder" >&2
mkdir -p "$folder"
log=$folder/install.log
if "$python" -m venv "$folder/venv" > "$log" 2>&1 &&
  "$folder/venv/bin/python" -m pip install --quiet uv >> "$log" 2>&1; then
  echo "$folder/venv/bin/uv"
elif "$python" -m pip install --quiet --target "$folder" uv >> "$log" 2>&1; then
  echo "$folder/bin/uv"
else
  rm -rf "$folder/venv"
  grep -v ^WARNING "$log" | tail -n 5 >&2 || true
  echo "cannot install uv: it takes python3-venv or python3-pip (Debian: apt install python3-venv)," \
    "and a network; or install uv yourself" >&2
  exit 1
fi
