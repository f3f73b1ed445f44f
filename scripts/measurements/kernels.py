"""Kernels: what is tested and compiled without an accelerator (K1 to K4), and how fast they are on one (K5 to K9).

Rows that need an accelerator are not measurable without one: they have no value, say so, and are not met.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.exactness.layouts import Layout
from scripts.exactness.runner import prove
from scripts.exactness.verdict import Verdict
from scripts.measurements.rows import Context, NotMeasurableError, Row
from scripts.measuring.processes import ROOT

_TIMEOUT_SECONDS = 1200
_TESTS = "tests/unit/kernels"
_SMALL = Layout(
    "kernels",
    "1 rank, SwiGLU, Triton kernels under the interpreter",
    1,
    "--swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --num-layers 1 --hidden-size 64 "
    "--num-attention-heads 2 --ffn-hidden-size 128 --moe-ffn-hidden-size 128 --num-experts 4 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 2",
)
"""A layer whose experts have two pages each, small enough for the interpreter."""
PROVED_STEPS = 8


def _run(*command: str, **environment: str) -> tuple[float, str]:
    """Seconds and output of a command of one thread. Raises RuntimeError where it fails."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **environment}
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return time.monotonic() - start, done.stdout


def _tests(*, whole: bool) -> float:
    environment = {"MEGASCALE_KERNELS_WHOLE": "1"} if whole else {}
    seconds, output = _run(sys.executable, "-m", "pytest", "-q", _TESTS, **environment)
    if not re.search(r"\b\d+ passed", output) or "skipped" in output.splitlines()[-1]:
        raise RuntimeError(f"tests were skipped: {output.splitlines()[-1]}")
    return seconds


def _compiled(context: Context) -> tuple[float, list[dict[str, Any]]]:
    """Every kernel for every target; problems fail the command, so that they are counted in a second row."""

    def measure() -> tuple[float, list[dict[str, Any]]]:
        with _fresh_cache() as cache:
            seconds, output = _run(sys.executable, "-m", "scripts.kernel_targets", TRITON_CACHE_DIR=cache)
        return seconds, [json.loads(line) for line in output.splitlines()]

    return context.once("compiled kernels", measure)


@contextmanager
def _fresh_cache() -> Iterator[str]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="megascale-kernels-") as folder:
        yield folder


def _whole(context: Context) -> float:
    return _tests(whole=True) + _compiled(context)[0]


def _spilled(context: Context) -> float:
    return float(sum(row["spilled_bytes"] for row in _compiled(context)[1]))


def undocumented_kernels() -> list[str]:
    """Kernels whose docstring lacks the formula, the shapes or the layout."""
    found = []
    for path in sorted((ROOT / "triton_kernels").glob("*.py")):
        module = import_module(f"megascale_omni.kernels.{path.stem}")
        for name in re.findall(r"^@triton\.jit(?:\([^)]*\))?\ndef (\w+)\(", path.read_text(), flags=re.M):
            function = getattr(module, name)
            text = getattr(function, "fn", function).__doc__ or ""
            is_kernel = f"{name}[" in path.read_text()
            if is_kernel and not all(f"    {part}: " in text for part in ("Formula", "Shapes", "Layout")):
                found.append(f"{path.stem}.{name}")
    return found


@contextmanager
def _interpreted() -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def prove_with_kernels(data_path: Path, layout: Layout = _SMALL) -> Verdict:
    """The step-by-step proof and the mutant, experts computed by interpreted kernels."""
    flags = ("--megascale-page-size", "64KiB", "--megascale-backend", "triton")
    with _interpreted():
        return prove(layout, data_path=data_path, steps=PROVED_STEPS, parts=("steps", "mutant"), megascale_flags=flags)


def _proof(context: Context) -> Verdict:
    return context.once("kernels proved", lambda: prove_with_kernels(context.data_path))


def _mutant(context: Context) -> float:
    mutant = _proof(context).mutant
    assert mutant is not None
    return mutant.gradient.share if mutant.caught else 0.0


def _on_accelerator(what: str, *, of: str = "device", **options: int | str) -> Callable[[Context], float]:
    """A measurement of `kernels_device` or `kernels_layer`; without an accelerator there is none."""

    def measure(context: Context) -> float:
        import torch

        if not torch.cuda.is_available():
            raise NotMeasurableError("needs an accelerator (bash scripts/gpu_check.sh on a machine with one)")
        value: float = getattr(import_module(f"scripts.measurements.kernels_{of}"), what)(**options)
        return value

    return measure


def _device_rows() -> list[Row]:
    rows = []
    for tokens in (64, 256, 1024, 8192):
        for other, bound in (("grouped_mm", 0.95), ("roofline", 0.8)):
            rows.append(
                Row(
                    id=f"K5-{tokens}-{other}",
                    what=f"paged first product, bf16, {tokens} tokens an expert: throughput against {other}",
                    unit="x",
                    kind="at_least",
                    bound=bound,
                    measure=_on_accelerator("product_ratio", tokens=tokens, other=other),
                )
            )
    shares = (
        ("K6", "page-in bandwidth against a plain pinned copy", "page_in_ratio", "device", 0.95),
        ("K7", "page-in hidden behind products, as a share of the shorter of the two", "overlap_share", "device", 0.9),
        ("K8", "fused AdamW: bytes a second against a copy on the device", "adam_ratio", "device", 0.85),
        (
            "K9-speed",
            "MoE layer, forward and backward, tokens a second: kernels / torch's products",
            "layer_ratio",
            "layer",
            1.0,
        ),
        (
            "K9-step",
            "MoE layer, a whole step: seconds of the best experts class of stock / ours, all pages resident",
            "step_ratio",
            "layer",
            1.0,
        ),
        (
            "K9-memory",
            "the same step, peak device memory: stock / ours, a quarter of all pages resident",
            "memory_ratio",
            "layer",
            2.0,
        ),
    )
    for row_id, what, function, of, bound in shares:
        measure = _on_accelerator(function, of=of)
        rows.append(Row(id=row_id, what=what, unit="x", kind="at_least", bound=bound, measure=measure))
    return rows


ROWS: tuple[Row, ...] = (
    Row(
        id="K1-suite",
        what="tests of kernels under the interpreter, and some compiled, as the suite runs them, one thread",
        unit="s",
        kind="at_most",
        bound=150,
        aim=75,
        measure=lambda context: _tests(whole=False),
    ),
    Row(
        id="K1-whole",
        what="every combination under the interpreter, every kernel compiled for every target, one thread",
        unit="s",
        kind="at_most",
        bound=480,
        measure=_whole,
    ),
    Row(
        id="K2",
        what="bytes spilled by all kernels as they ship, over all targets",
        unit="bytes",
        kind="at_most",
        bound=0,
        measure=_spilled,
    ),
    Row(
        id="K3",
        what="kernels whose docstring lacks formula, shapes or layout",
        unit="kernels",
        kind="at_most",
        bound=0,
        measure=lambda context: float(len(undocumented_kernels())),
    ),
    Row(
        id="K4-steps",
        what=f"{PROVED_STEPS} steps with interpreted kernels compared with stock's, the worst deviation",
        unit="of its bound",
        kind="at_most",
        bound=1.0,
        measure=lambda context: _proof(context).worst_share,
    ),
    Row(
        id="K4-mutant",
        what="one expert's gradient x 1.001, seen in it",
        unit="of its bound",
        kind="at_least",
        bound=1.0,
        measure=_mutant,
    ),
    *_device_rows(),
)
