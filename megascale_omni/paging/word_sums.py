"""The sums of a page's words, on the host: those that ``triton_kernels/page_checksum.py`` takes on a device."""

from __future__ import annotations

import numpy as np
import torch

_ROW, _ROWS = 1024, 256
"""Words of a row, whose weighted sum is a whole number below 2^53: a product of fp64 matrices has it exactly."""


def word_sums(page: torch.Tensor) -> tuple[int, int]:
    """(sum of w_i, sum of (i + 1) w_i) of the int32 words of a flat page in host memory, modulo 2^64, as int64.

    Raises:
        ValueError: its bytes are no whole words.
    """
    nbytes = page.numel() * page.element_size()
    if nbytes % 4:
        raise ValueError(f"page: {nbytes} bytes, must be a multiple of 4")
    weights = torch.stack([torch.ones(_ROW), torch.arange(1.0, _ROW + 1)], dim=1).double()
    room, sums = torch.empty(_ROWS * _ROW, dtype=torch.float64), []
    for part in page.view(torch.int32).split(_ROWS * _ROW):
        rows = -(-part.numel() // _ROW)
        room[part.numel() : rows * _ROW] = 0.0
        room[: part.numel()].copy_(part)
        sums.append((room[: rows * _ROW].view(rows, _ROW) @ weights).to(torch.int64).numpy())
    table = np.concatenate(sums) if sums else np.zeros((0, 2), dtype=np.int64)
    before = np.arange(len(table), dtype=np.int64) * _ROW  # words before each row; arrays of integers wrap
    table[:, 1] += before * table[:, 0]
    first, second = table.sum(0).tolist()
    return first, second
