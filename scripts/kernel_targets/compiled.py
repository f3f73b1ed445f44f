"""Compiles a kernel for a target and reads from the machine code what it uses."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scripts.kernel_targets.specs import Spec

SHARED_LIMIT_BYTES = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "cuda:100": 227 * 1024, "hip:gfx942": 64 * 1024}
"""Shared memory that a program may have (CUDA C programming guide, table of compute capabilities; CDNA 3 ISA: LDS)."""
MATRIX = {
    "cuda:80": r"\bmma\.sync",
    "cuda:90": r"wgmma\.mma_async",
    "cuda:100": r"tcgen05\.mma",
    "hip:gfx942": r"v_mfma_",
}
"""The matrix instruction that a target's products must use."""
NARROW = {
    "cuda": r"\b(?:ld|st)\.global[\w.:]*\.b(?:8|16)\b",
    "hip": r"\b(?:global|buffer|flat)_(?:load|store)_u?(?:short|byte)\w*",
}
"""Accesses of one small element at a time: a fraction of the bandwidth."""
WIDE = {"cuda": r"\b(?:ld|st)\.global[\w.:]*\.(?:v4\.b32|v2\.b64)\b", "hip": r"_(?:load|store)_dwordx[24]\b"}
"""Accesses of 16 bytes, the most that an instruction moves; 8 where twice as many threads share a block."""
_BIN = Path(os.path.dirname(triton.__file__)) / "backends" / "nvidia" / "bin"
_TYPE = re.compile(r"\*?(?:i1|i8|i16|i32|i64|fp16|bf16|fp32|fp64)(?::\d+)?")
_TOOL_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Compiled:
    """What a kernel uses on a target."""

    kernel: str
    target: str
    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    problems: tuple[str, ...]


def compile_spec(spec: Spec) -> Compiled:
    """Compiles one kernel. What Triton or the assembler refuse is an error of theirs."""
    start = time.monotonic()
    kernel = triton.compile(_source(spec), target=_target(spec.target), options=dict(spec.options))
    cuda = spec.target.startswith("cuda")
    text: str = kernel.asm["ptx" if cuda else "amdgcn"]
    registers, spilled = _of_ptx(text, spec.target) if cuda else _of_amdgcn(text)
    matrix, shared = len(re.findall(MATRIX[spec.target], text)), int(kernel.metadata.shared)
    return Compiled(
        kernel=spec.tag,
        target=spec.target,
        seconds=round(time.monotonic() - start, 2),
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        matrix_instructions=matrix,
        problems=tuple(_problems(spec, text, kernel.asm["ttgir"], spilled=spilled, shared=shared, matrix=matrix)),
    )


def operands_waited_for(ttgir: str) -> int:
    """Tiles that a loop loads when it needs them, in Triton's intermediate code: none where they are copied ahead."""
    loops: list[int] = []
    waits = 0
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while loops and indent <= loops[-1] and line.lstrip().startswith("}"):
            loops.pop()
        if "scf.for" in line:
            loops.append(indent)
        waits += bool(loops) and re.search(r"= tt\.load .*tensor<\d+x\d+x!tt\.ptr", line) is not None
    return waits


def _problems(spec: Spec, text: str, ttgir: str, *, spilled: int, shared: int, matrix: int) -> list[str]:
    found, backend = [], spec.target.partition(":")[0]
    if spec.wide:
        narrow = len(re.findall(NARROW[backend], text))
        if narrow:
            found.append(f"{narrow} accesses of single small elements")
        if not re.search(WIDE[backend], text):
            found.append("no access of whole words")
    if spilled:
        found.append(f"{spilled} bytes of registers are spilled")
    if shared > SHARED_LIMIT_BYTES[spec.target]:
        found.append(f"{shared} bytes of shared memory, the chip has {SHARED_LIMIT_BYTES[spec.target]}")
    if spec.products and not matrix:
        found.append("products without matrix instructions")
    waits = operands_waited_for(ttgir) if spec.products and backend == "cuda" else 0
    if waits:
        found.append(f"{waits} operands are waited for in a loop of products")
    if spec.exact and spec.target.startswith("cuda"):
        if ".ftz" in text:
            found.append("subnormal numbers are flushed to zero")
        for wanted in ("div.rn.f32", "sqrt.rn.f32", "fma.rn.f32"):
            if wanted not in text:
                found.append(f"no {wanted}")
    return found


def _source(spec: Spec) -> ASTSource:
    function: Any = spec.kernel
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for position, name in enumerate(function.arg_names):
        value = spec.arguments[name]
        if isinstance(value, str) and _TYPE.fullmatch(value):
            kind, _, divisor = value.partition(":")
            signature[name] = kind
            if divisor:
                attributes[(position,)] = [["tt.divisibility", int(divisor)]]
        else:
            signature[name], constants[name] = "constexpr", value
    return ASTSource(function, signature, constants, attributes)


def _target(name: str) -> GPUTarget:
    backend, _, arch = name.partition(":")
    return GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)


def _of_ptx(ptx: str, target: str) -> tuple[int, int]:
    """Registers and spilled bytes, as the assembler reports them."""
    arch = int(target.partition(":")[2])
    assembler = _BIN / ("ptxas" if arch < 90 else "ptxas-blackwell")
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [assembler, "-v", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", file.name, "-o", os.devnull],
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_SECONDS,
            check=True,
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    if spills is None or registers is None:
        raise RuntimeError(f"the assembler says nothing about registers: {done.stderr[-500:]}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def _of_amdgcn(text: str) -> tuple[int, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if found is None:
            raise RuntimeError(f"the assembly says nothing about {name}")
        return int(found[1])

    spilled = 4 * (number("vgpr_spill_count") + number("sgpr_spill_count"))
    return number("vgpr_count"), max(spilled, number("private_segment_fixed_size"))
