#!/usr/bin/env bash
# Makes the virtual environment when it is missing, and installs Kvoy with the given extras into it.
#
#   tools/install.sh VENV EXTRAS          e.g. tools/install.sh .venv engine,router,cli
#
# TORCH_INDEX names an index for torch alone: torch goes in first from there, and is then kept.
set -euo pipefail

venv=$1
extras=$2
uv=$(tools/find-uv.sh "${PYTHON:-python3}")

if [ ! -x "$venv/bin/python" ]; then
  "$uv" venv --quiet --python '>=3.11' "$venv"
fi
if [ -n "${TORCH_INDEX:-}" ] && [[ ,$extras, =~ ,(engine|all|dev), ]]; then
  requirement=$(sed -n 's/^ *"\(torch[<>=][^"]*\)",$/\1/p' pyproject.toml)
  echo "installing $requirement from $TORCH_INDEX"
  "$uv" pip install --python "$venv/bin/python" --index "$TORCH_INDEX" "$requirement"
fi
echo "installing Kvoy with [$extras] into $venv"
"$uv" pip install --python "$venv/bin/python" --editable ".[$extras]"
