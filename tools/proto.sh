#!/usr/bin/env bash
# Generates the Python stubs of the protocol files.
#
#   tools/proto.sh PYTHON           writes them to contract/
#   tools/proto.sh PYTHON --check   fails when those in contract/ are not what the files give
set -euo pipefail

python=$1
source=contract/kvoy_contract/proto/kvoy/v1/telemetry.proto

generate() {
  "$python" -m grpc_tools.protoc -I contract \
    "--python_out=$1" "--pyi_out=$1" "--grpc_python_out=$1" "$source"
}

if [ "${2:-}" != --check ]; then
  generate contract
  exit 0
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
(cd "$fresh" && find . -type f) | while read -r stub; do
  if ! cmp -s "$fresh/$stub" "contract/$stub"; then
    echo "contract/$stub is not what $source gives: run make proto" >&2
    exit 1
  fi
done
