#!/usr/bin/env bash
# The `openai` Python client against the router and its mock engines, over real sockets.
#
#   OPENAI_TEST_VENV  where the Python packages go (default: openai-venv in the target directory);
#                     used again for as long as requirements.txt stays the same
#   POINTSMAN_BIN     the binary to test (default: a debug build of this tree)
#   PYTHON            the interpreter that makes the venv (default: python3)
#
# Arguments go to pytest: `tests/openai/run.sh -k tools`.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
venv=${OPENAI_TEST_VENV:-$target/openai-venv}
python=${PYTHON:-python3}

if [[ -z ${POINTSMAN_BIN:-} ]]; then
    (cd "$root" && cargo build --quiet --package pointsman)
    POINTSMAN_BIN=$target/debug/pointsman
fi
export POINTSMAN_BIN

# Written last, so that a venv whose installation broke off is not taken for a good one.
stamp=$venv/requirements.installed
if ! cmp --silent "$here/requirements.txt" "$stamp"; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/requirements.txt"
    cp "$here/requirements.txt" "$stamp"
fi

cd "$here"
exec "$venv/bin/python" -m pytest -p no:cacheprovider "$@"
