# Sourced by the other scripts: goes to the repository root, makes .venv and installs the package and its tools there.
# A second run does nothing unless pyproject.toml or the pins changed. Needs only Python 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pins=configs/constraints.txt
installed=.venv/installed.sha256
if ! sha256sum --status --check "$installed" 2>/dev/null; then
    [ -x .venv/bin/python ] || "$(command -v python3.11 || command -v python3)" -m venv .venv
    .venv/bin/python -m pip install --quiet --constraint "$pins" --editable ".[cli,megatron,test,dev]"
    sha256sum pyproject.toml "$pins" >"$installed"
fi
export OMP_NUM_THREADS=1 # the multi-process tests start more ranks than a small machine has cores
