"""Bulk work by kernels: one launch for many pages, gradients or rows. See ``megascale_omni/bulk.py``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megascale_omni.bulk import TORCH, Factor, Pair
from megascale_omni.kernels.bf16_wire import pack_bf16, unpack_bf16
from megascale_omni.kernels.checks import ALIGNMENT
from megascale_omni.kernels.interpreter import is_interpreted, repair
from megascale_omni.kernels.page_checksum import page_checksums
from megascale_omni.kernels.page_copy import copy_pages
from megascale_omni.kernels.permute_rows import permute, sum_segments
from megascale_omni.kernels.scaled_clip import scale_groups
from megascale_omni.kernels.segments import DTYPES, upload

FEWEST = 3
"""Copies that are worth a launch: its table is a copy to the device as well."""


class KernelBulk:
    """See :class:`megascale_omni.bulk.Bulk`. What a kernel does not have (a dtype, one page alone) torch does."""

    name = "triton"

    def __init__(self) -> None:
        if is_interpreted():
            repair()

    def copy(self, pairs: Sequence[Pair]) -> None:
        """See the protocol: a launch for the pages of each length."""
        by_kind: dict[tuple[torch.dtype, int], list[Pair]] = {}
        for source, target in pairs:
            by_kind.setdefault((source.dtype, source.numel()), []).append((source, target))
        for alike in by_kind.values():
            if len(alike) >= FEWEST and all(map(_has_words, alike)):
                copy_pages([source for source, _ in alike], [target for _, target in alike])
            else:
                TORCH.copy(alike)

    def scale(self, groups: Sequence[Sequence[torch.Tensor]], factors: Sequence[Factor]) -> None:
        """See the protocol: a launch for the gradients of each dtype and device."""
        kinds = {(g.dtype, g.device) for gradients in groups for g in gradients}
        for dtype, device in sorted(kinds, key=str):
            mine = [[g for g in gradients if (g.dtype, g.device) == (dtype, device)] for gradients in groups]
            strange = dtype not in DTYPES or any(not g.is_contiguous() for gradients in mine for g in gradients)
            if strange or not _runs_on(device):
                TORCH.scale(mine, factors)
                continue
            scale_groups([[g.view(-1) for g in gradients] for gradients in mine], _coefficients(factors, dtype, device))

    def pack(self, gradients: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        """See the protocol."""
        pack_bf16(gradients, wire)

    def unpack(self, wire: torch.Tensor, gradients: Sequence[torch.Tensor], *, add: bool) -> None:
        """See the protocol."""
        unpack_bf16(wire, gradients, add=add)

    def checksums(self, pages: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See the protocol."""
        return page_checksums(pages)

    def take_rows(self, values: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        return permute(values.contiguous(), index_N) if values.dtype in DTYPES else TORCH.take_rows(values, index_N)

    def sum_segments(self, values: torch.Tensor, items: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        return sum_segments(values, items, starts)


def _coefficients(factors: Sequence[Factor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[groups]``, fp32, on the device; the host waits for none."""
    there = [isinstance(factor, torch.Tensor) and factor.device.type != "cpu" for factor in factors]
    numbers = [0.0 if away else float(factor) for factor, away in zip(factors, there, strict=True)]
    (coefficients,) = upload(device, np.asarray(numbers, dtype=np.float64))
    coefficients = coefficients.float()
    for place, factor in enumerate(factors):
        if there[place] and isinstance(factor, torch.Tensor):
            coefficients[place] = factor.to(dtype)
    return coefficients


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and is_interpreted())


def _has_words(pair: Pair) -> bool:
    """Whether a kernel can copy it: whole words at multiples of what it reads at once, on both sides."""
    source, target = pair
    return (
        source.numel() > 0
        and source.numel() * source.element_size() % 4 == 0
        and source.data_ptr() % ALIGNMENT == 0
        and target.data_ptr() % ALIGNMENT == 0
    )
