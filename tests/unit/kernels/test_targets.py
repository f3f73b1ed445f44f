"""Kernels compile for accelerators that are not here: no spills, shared memory that there is, matrix instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WHOLE = bool(os.environ.get("MEGASCALE_KERNELS_WHOLE"))
# In the suite one kernel of each kind for each target; all of them with MEGASCALE_KERNELS_WHOLE, and in measure.py.
SAMPLED = {
    "cuda:80": ("paged_slice_sum", "paged_adam"),
    "cuda:90": ("paged_fc1 bf16 silu", "paged_weight_gradient bf16 fc1"),
    "cuda:100": ("paged_activation_backward bf16 silu",),
    "hip:gfx942": ("paged_weight_gradient bf16 fc1", "gradient_statistics", "sum_rows"),
}


def compiled(target: str, kernels: tuple[str, ...], cache: Path) -> tuple[int, list[dict[str, object]]]:
    """Exit status and results of the command, in a process where nothing is interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.kernel_targets", "--target", target]
    command += [word for kernel in kernels for word in ("--kernel", kernel)]
    done = subprocess.run(
        command, cwd=ROOT, env=env | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", SAMPLED)
def test_kernels_as_they_ship_fit_the_target(target, tmp_path):
    status, results = compiled(target, () if WHOLE else SAMPLED[target], tmp_path)
    assert status == 0, [result for result in results if result["problems"]]
    assert results
    for result in results:
        assert result["spilled_bytes"] == 0
        if "bf16" in str(result["kernel"]) and str(result["kernel"]).startswith("paged"):
            assert result["matrix_instructions"], result


def test_what_does_not_fit_is_said(tmp_path):
    script = (
        "import json\n"
        "from dataclasses import replace\n"
        "from scripts.kernel_targets.compiled import compile_spec\n"
        "from scripts.kernel_targets.specs import specs\n"
        "spec = next(s for s in specs('cuda:80') if s.tag == 'paged_slice_sum bf16 down')\n"
        "wide = replace(spec, arguments=spec.arguments | {'BM': 128, 'BN': 256}, options={'num_warps': 4})\n"
        "print(json.dumps(compile_spec(wide).problems))\n"
        "adam = next(s for s in specs('cuda:80') if s.tag == 'paged_adam l2')\n"
        "print(json.dumps(compile_spec(replace(adam, products=True, wide=False)).problems))\n"
        "import triton\n"
        "from scripts.kernel_targets.compiled import _source, _target\n"
        "for name in ('bf16_wire add', 'scaled_clip', 'page_copy', 'page_checksum'):\n"
        "    spec = next(s for s in specs('cuda:80') if s.tag == name)\n"
        "    target = _target(spec.target)\n"
        "    built = [triton.compile(_source(spec), target=target, options={'debug': d}) for d in (False, True)]\n"
        "    print(json.dumps(['assertfail' in kernel.asm['ptx'] for kernel in built]))\n"
        "narrow = replace(spec, arguments=spec.arguments | {'ALIGNED': False})\n"
        "print(json.dumps(compile_spec(narrow).problems))\n"
        "load = '  %b = tt.load %c : tensor<64x32x!tt.ptr<bf16>>'\n"
        "waits = '\\n'.join(['scf.for %k = %a {', load, '}', load])\n"
        "from scripts.kernel_targets.compiled import operands_waited_for\n"
        "print(operands_waited_for(waits))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wide, plain, *asserts, narrow, waits = (json.loads(line) for line in done.stdout.splitlines())
    assert any("registers are spilled" in problem for problem in wide)
    assert plain == ["products without matrix instructions"]
    assert asserts == [[False, True]] * 4, "debug builds trap, others do not"
    assert narrow == ["no access of whole words"]
    assert waits == 1
