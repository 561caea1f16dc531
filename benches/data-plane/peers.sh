#!/usr/bin/env bash
# Other routers for the bench, each in a venv of its own: `benches/data-plane/peers.sh DIRECTORY`, then
# `data-plane --peers DIRECTORY`.
set -euo pipefail
mkdir -p "$1"
for package in vllm-router==0.1.17 sglang-router==0.3.2 smg==1.13.0; do
  venv=$1/${package%%==*}
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "$package"
done
