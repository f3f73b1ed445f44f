#!/usr/bin/env bash
# Lint, types, import rules and the whole test suite; arguments go to pytest:
#     bash scripts/test.sh [-k name] [-x] [tests/unit ...]
# Two test files at a time where there are two cores; `-n 0` runs them one by one.
# Every part runs even where one before it failed; the last lines say which did. Non-zero exit if any failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

bash scripts/setup_env.sh || exit 1
. .venv/bin/activate

# Tests run several processes on few cores: more threads only get into each other's way, and results stay comparable.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMEXPR_NUM_THREADS=1 PYTHONUNBUFFERED=1

# A file stays on one process: what its tests share is made once.
workers=()
(($(env -u OMP_NUM_THREADS nproc) > 1)) && workers=(-n 2 --dist loadfile)

failed=()
part() {
    local name=$1 start=$SECONDS
    shift
    printf '== %s\n' "$name"
    "$@" || failed+=("$name")
    printf '== %s: %d s\n' "$name" $((SECONDS - start))
}

part "ruff check" python -m ruff check --quiet .
part "ruff format" python -m ruff format --quiet --diff .
part "mypy" python -m mypy
part "import rules" lint-imports --no-logo
part "pytest" python -m pytest "${workers[@]}" "$@"

if ((${#failed[@]})); then
    printf '== FAILED after %d s: ' "$SECONDS"
    printf '%s; ' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf '== all parts passed in %d s\n' "$SECONDS"
