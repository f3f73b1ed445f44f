"""Stock DeepSpeed on a machine without a compiler for its operators."""

from __future__ import annotations


def without_compiled_ops() -> None:
    """Lets DeepSpeed's CPU back end communicate through gloo alone; call it before ``deepspeed.initialize``.

    Where it can, DeepSpeed compiles an operator for reductions in shared memory at its first start, which takes a
    minute or more. Reductions through gloo compute the same up to the order of sums.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
