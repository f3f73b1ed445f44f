#!/usr/bin/env bash
# What needs an accelerator, in pieces that fit a limit of time: tests in tests/gpu, file by file, then the rows of
# `measure.py kernels` that are measured on one.
#     bash scripts/gpu_check.sh [--seconds 540] [--out docs/benchmarks] [--tests | --rows] [--again] [--row K5] ...
# What has passed or has a value is kept, test by test and row by row: where the time is up (exit status 3), the same
# command goes on from there. Three times 540 s should be enough: kernels are compiled in the first (Triton keeps them).
# `--again` begins anew. What passed is of the same sources. Uses the Python that is active (PYTHON names another), with
# torch for the accelerator, triton, numpy, pytest, hypothesis, and for the rows K9 megatron-core; nothing is installed.
# Writes OUT/<name of the accelerator>.json, .md (the table), .passed, .seconds (used so far) and .log. Exit status: 0 all
# passed and met, 1 something failed or is not met, 2 no accelerator, or a package is missing, 3 the time is up.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() {
    printf 'gpu_check: %s\n' "$1" >&2
    sed -n '4p' "${BASH_SOURCE[0]}" | cut -c7- >&2
    exit 1
}

limit=540 out=docs/benchmarks parts=" tests rows " again= rows=()
while (($#)); do
    case $1 in
        --seconds) limit=${2:-}; shift ;;
        --out) out=${2:-}; shift ;;
        --row) rows+=(--row "${2:-}"); shift ;;
        --tests) parts=" tests " ;;
        --rows) parts=" rows " ;;
        --again) again=1 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
        *) usage "unknown argument $1" ;;
    esac
    shift || usage "an argument has no value"
done
[[ $limit =~ ^[1-9][0-9]*$ && -n $out ]] || usage "--seconds and --out need a value"
((${#rows[@]})) || for id in K5 K6 K7 K8 K9; do rows+=(--row "$id"); done

unset TRITON_INTERPRET  # interpreted kernels measure nothing
export PYTHONUNBUFFERED=1
python=${PYTHON:-python}
missing=$("$python" - <<'PYTHON'
from importlib.util import find_spec
print(*(name for name in ("torch", "triton", "numpy", "pytest", "hypothesis") if find_spec(name) is None))
PYTHON
) || exit 2
if [[ -n $missing ]]; then
    echo "gpu_check: $python has no $missing; nothing was tested or measured" >&2
    exit 2
fi
name=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || exit 2
if [[ -z $name ]]; then
    echo "gpu_check: no accelerator found by torch; nothing was tested or measured" >&2
    exit 2
fi

mkdir -p "$out" || exit 1
base=$out/${name//[^A-Za-z0-9]/-}
[[ -n $again ]] && rm -f "$base".{json,md,passed,seconds} "$base".passed.*
failed=() unfinished=
before=$(cat "$base.seconds" 2>/dev/null || echo 0)
trap 'echo $((before + SECONDS)) >"$base.seconds"' EXIT

# Runs a command in what is left of the time; 124 where that was not enough.
within() {
    local left=$((limit - SECONDS))
    ((left > 1)) || return 124
    timeout --kill-after=20 "$left" "$@"
}

if [[ $parts == *" tests "* ]]; then
    sources=$(find megascale_omni triton_kernels/ scripts/measurements tests/gpu -name '*.py' -print0 | sort -z | xargs -0 cat | sha256sum | cut -c1-16)
    export MEGASCALE_GPU_PASSED=$(realpath "$out")/${base##*/}.passed.$sources
    for file in tests/gpu/test_*.py; do
        grep -qsxF "$file $sources" "$base.passed" && { echo "$file passed before"; continue; }
        within "$python" -m pytest -q "$file" 2>&1 | tee -a "$base.log"
        case ${PIPESTATUS[0]} in
            0) echo "$file $sources" >>"$base.passed" ;;
            124 | 137) unfinished="$file"; break ;;
            *) failed+=("$file") ;;
        esac
    done
fi
if [[ -z $unfinished && $parts == *" rows "* ]]; then
    within "$python" scripts/measure.py kernels "${rows[@]}" --json "$base.json" --resume 2>&1 >/dev/null | tee -a "$base.log"
    case ${PIPESTATUS[0]} in
        0) ;;
        124 | 137) unfinished="rows" ;;
        *) failed+=("rows (see $base.json)") ;;
    esac
fi
if [[ -f $base.json ]]; then
    "$python" - "$base.json" >"$base.md" <<'PYTHON' || failed+=("table")
import json, sys

found = json.load(open(sys.argv[1]))
environment = found["environment"]
packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
print(f"{', '.join(gpu['name'] for gpu in environment['gpus'])}; {packages}; {environment['date']}\n")
print("| row | what | value | bound | met |\n|---|---|---|---|---|")
for row in found["rows"]:
    bound = f">= {row['at_least']}" if "at_least" in row else f"<= {row['at_most']}"
    value = row.get("error", "not measured").splitlines()[0] if row["value"] is None else f"{row['value']:.3g} {row['unit']}"
    print(f"| {row['id']} | {row['what']} | {value} | {bound} | {'yes' if row['met'] else 'no'} |")
PYTHON
    cat "$base.md"
fi

((${#failed[@]})) && printf 'gpu_check FAILED: %s\n' "${failed[*]}"
if [[ -n $unfinished ]]; then
    printf 'gpu_check: the %d s were up at %s (%d s so far); run it again to go on\n' \
        "$limit" "$unfinished" "$((before + SECONDS))"
    exit 3
fi
((${#failed[@]})) && exit 1
echo "gpu_check passed; tables are in $base.md ($((before + SECONDS)) s in all)"
