#!/bin/sh
# Writes the Python stubs of all protos. Run by `make protos`; tests/test_protos.py checks that they are fresh.
set -eu
cd "$(dirname "$0")/.."
out="${1:-.}"
"${PYTHON:-python}" -m grpc_tools.protoc -I protos --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    protos/weir/rpc/v1/*.proto
