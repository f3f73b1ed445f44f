"""Flat pieces of pages as kernels for elementwise work read them: a table of addresses, and blocks of elements.

A *segment* is consecutive elements of one page (a page, or its weights, or its biases). One launch serves all segments
of a call; a program works on one block of one segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from megascale_omni.bulk import on_device
from megascale_omni.kernels.checks import ALIGNMENT, require_reachable

MULTIPLE = tl.constexpr(ALIGNMENT)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Of weights, tokens and gradients: torch's name and Triton's."""


@triton.jit
def pointer_to(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from a table. What is said of it, not of the number, lets the compiler read whole words, and ahead."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, MULTIPLE)
    return pointer


@triton.jit
def count_at(place, ALIGNED: tl.constexpr):
    """A number from a table that is a multiple of 16 where all is aligned: so are a block's begin and its mask.

    Loaded here: what is said of an argument is forgotten where a function is inlined.
    """
    number = tl.load(place)
    if ALIGNED:
        number = tl.multiple_of(number, MULTIPLE)
    return number


def upload(device: torch.device, *tables: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Tables on a device in one copy that nothing waits for; the bytes of each must be a multiple of 8."""
    words = [np.ascontiguousarray(table).reshape(-1).view(np.int64) for table in tables]
    flat = on_device(np.concatenate(words), device)
    parts = zip(flat.split([len(part) for part in words]), tables, strict=True)
    return tuple(part.view(torch.from_numpy(table.reshape(-1)[:0]).dtype).view(table.shape) for part, table in parts)


def blocks_of(numels: Sequence[int] | np.ndarray, block: int) -> np.ndarray:
    """(segment, first element of the block) int64 ``[blocks, 2]``, segments ascending."""
    numel = np.asarray(numels, dtype=np.int64)
    counts = -(-numel // block)
    owner = np.repeat(np.arange(len(numel)), counts)
    first = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owner, first * block], axis=1)


def same_device(name: str, tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of all tensors. Raises ValueError, naming the first other one, where they have several."""
    device = tensors[0].device
    require_reachable(name, device)
    for number, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"{name} {number}: on {tensor.device}, must be on {device} like the first one")
    return device


def require_flat(name: str, tensor: torch.Tensor, *, dtypes: Sequence[torch.dtype], numel: int | None = None) -> None:
    """Refuses a segment that is not contiguous, of another dtype or length. Raises ValueError with its name."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)}, must be contiguous")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name}: {tensor.numel()} elements, must be {numel}")


def all_aligned(*numbers: np.ndarray) -> bool:
    """Whether all addresses (0 for none), numbers of elements and places are multiples of ``ALIGNMENT``.

    Then kernels read and write whole words; the results are the same.
    """
    return not any((table % ALIGNMENT).any() for table in numbers)
