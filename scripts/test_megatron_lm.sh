#!/usr/bin/env bash
# Tests that run the scripts of a checkout of Megatron-LM, unmodified; further arguments go to pytest:
#     bash scripts/test_megatron_lm.sh /path/to/Megatron-LM [-k ep2] [-x]
# The checkout needs what its own requirements say: on a CPU, pybind11, six, regex, g++ and make.
set -euo pipefail
if [[ $# -lt 1 || ! -d $1/megatron/training ]]; then
    printf 'usage: bash scripts/test_megatron_lm.sh PATH [pytest arguments]: %s is no checkout of Megatron-LM\n' "${1:-PATH}" >&2
    exit 2
fi
MEGATRON_LM_PATH=$(cd "$1" && pwd -P)
export MEGATRON_LM_PATH
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh
. .venv/bin/activate
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
python -m pytest tests/megatron_lm -m megatron_lm "$@"
