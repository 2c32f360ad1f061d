#!/usr/bin/env bash
# Every check of this project, on a machine with Python 3.11 and nothing else: bash scripts/test.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/basedpyright
.venv/bin/python -m pytest
