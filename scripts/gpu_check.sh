#!/usr/bin/env bash
# What needs an accelerator: tests in tests/gpu, then the rows of `measure.py kernels` that are measured on one.
#     bash scripts/gpu_check.sh [--row K5] ...
# Arguments go to measure.py. Uses the Python that is active (it needs torch for the accelerator, Triton and pytest).
# Writes docs/benchmarks/<date>-<name of the accelerator>.json and a table beside it. Exit status 2 without an accelerator.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

unset TRITON_INTERPRET  # interpreted kernels measure nothing
python=${PYTHON:-python}
name=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")') || exit 1
if [[ -z $name ]]; then
    echo "gpu_check: no accelerator found by torch; nothing was tested or measured" >&2
    exit 2
fi

rows=("$@")
((${#rows[@]})) || for id in K5 K6 K7 K8 K9; do rows+=(--row "$id"); done
out=docs/benchmarks/$(date +%F)-${name//[^A-Za-z0-9]/-}
mkdir -p docs/benchmarks

failed=()
"$python" -m pytest -q tests/gpu || failed+=("tests")
"$python" scripts/measure.py kernels "${rows[@]}" --json "$out.json" >/dev/null || failed+=("measurements (see $out.json)")
if [[ -f $out.json ]]; then
    "$python" - "$out.json" >"$out.md" <<'PYTHON' || failed+=("table")
import json, sys

found = json.load(open(sys.argv[1]))
print("| row | what | value | bound | met |\n|---|---|---|---|---|")
for row in found["rows"]:
    bound = f">= {row['at_least']}" if "at_least" in row else f"<= {row['at_most']}"
    value = row.get("error", "not measured") if row["value"] is None else f"{row['value']:.3g} {row['unit']}"
    print(f"| {row['id']} | {row['what']} | {value} | {bound} | {'yes' if row['met'] else 'no'} |")
PYTHON
    cat "$out.md"
fi

if ((${#failed[@]})); then
    printf 'gpu_check FAILED: %s\n' "${failed[*]}"
    exit 1
fi
echo "gpu_check passed; tables are in $out.md"
