"""Triton's interpreter, repaired: kernels on CPU tensors, for tests and for machines without an accelerator.

With ``TRITON_INTERPRET=1`` set while kernels are imported, Triton runs them with numpy. Its interpreter (3.9) works on
bf16 as raw 16-bit patterns in products and truncates fp32 -> bf16 where the hardware rounds to nearest even, silently.
:func:`repair` mends what our kernels use and makes the rest of bf16 arithmetic an error: kernels here compute in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def is_interpreted() -> bool:
    """Whether kernels that are imported now run under the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are imported for the first time inside run under the (repaired) interpreter."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        repair()
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """The numbers that bf16 bit patterns (uint16) stand for."""
    wide: np.ndarray = (bits.astype(np.uint32) << 16).view(np.float32)
    return wide


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16), rounded to nearest even as hardware does; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    result: np.ndarray = np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return result


def repair() -> None:
    """Repairs the interpreter of this process; idempotent.

    * fp32 -> bf16 rounds to nearest even (and everything else becomes bf16 through fp32);
    * products of bf16 operands are products of the numbers, summed in fp32;
    * comparisons give booleans, so that a scalar one can be a mask;
    * other arithmetic on bf16 raises TypeError;
    * kernels' assertions are checked;
    * Triton's own library functions are interpreted even where Triton was imported before.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "megascale_repaired", False):
        return
    _repair_casts(interpreter, builder)
    _repair_arithmetic(interpreter, builder)
    _interpret_library(interpreter)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
    builder.megascale_repaired = True


def _repair_casts(interpreter: Any, builder: Any) -> None:
    import triton.language as tl

    handle, cast = interpreter.TensorHandle, builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        from_type, to_type = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in (from_type, to_type) or from_type == to_type:
            return cast(self, source, target)
        if from_type == tl.bfloat16:
            wide = handle(bf16_to_fp32(source.data), tl.float32)
            return wide if to_type == tl.float32 else cast(self, wide, target)
        return handle(fp32_to_bf16(source.data.astype(np.float32)), tl.bfloat16)

    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast_impl(self, source, target)
        return convert(self, source, target, rounding)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _repair_arithmetic(interpreter: Any, builder: Any) -> None:
    import triton.language as tl

    handle = interpreter.TensorHandle
    dot, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op

    def widened(operand: Any) -> Any:
        return handle(bf16_to_fp32(operand.data), tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand

    def create_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, widened(a), widened(b), total, precision, imprecise)

    def refuse(*operands: Any) -> None:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError("arithmetic on bf16 under the interpreter: convert to fp32 first")

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        refuse(left, right)
        result = binary(self, left, right, op)
        return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    def unary_op(self: Any, operand: Any, op: Any) -> Any:
        refuse(operand)
        return unary(self, operand, op)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op


def _interpret_library(interpreter: Any) -> None:
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted_function = interpreter.InterpretedFunction(function.fn)
            setattr(tl.standard, name, interpreted_function)
            if getattr(tl, name, None) is function:
                setattr(tl, name, interpreted_function)
