#!/usr/bin/env bash
# Returns of sample rollouts on four ranks and on one, side by side: bash scripts/demo.sh [rollouts.jsonl]
rollouts=${1:+$(realpath "$1")}
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

exec .venv/bin/cp-returns simulate --config configs/zigzag_cp4.yaml ${rollouts:+--rollouts "$rollouts"}
