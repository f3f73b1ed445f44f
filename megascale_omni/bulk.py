"""What is done to many pages, gradients or rows at once: by torch, one after the other, or by kernels in one launch.

Who does it is chosen once, by device and configuration, as for products (see ``experts/backends.py``). Results have the
same bits either way: copies have no rounding, the others round once, where torch does. One is an exception: sums of
rows in bf16 on a CPU, which torch does not make in fp32 (kernels do, and so does torch on an accelerator).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from megascale_omni.config import BackendChoice

Pair = tuple[torch.Tensor, torch.Tensor]
"""Source and target of a copy: flat, of one dtype and length."""


Factor = float | torch.Tensor
"""A number, or a tensor of one."""


class Bulk(Protocol):
    """See the module's docstring. Tensors are on one device; nothing here makes the host wait for it."""

    name: str

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copies each source to its target. No target overlaps anything else."""
        ...

    def scale(self, groups: Sequence[Sequence[torch.Tensor]], factors: Sequence[Factor]) -> None:
        """Multiplies the gradients of group ``i`` by factor ``i``, in place: in fp32, rounded once to their dtype.

        A factor on the device, which the host does not wait for, is rounded to the gradients' dtype first, as by torch.
        """
        ...

    def pack(self, gradients: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        """Writes fp32 gradients (flat) into ``wire`` (bf16) one after the other, rounded to nearest even."""
        ...

    def unpack(self, wire: torch.Tensor, gradients: Sequence[torch.Tensor], *, add: bool) -> None:
        """The inverse; with ``add`` numbers are added, in fp32."""
        ...

    def checksums(self, pages: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """int64 ``[pages, 2]`` on the device: equal for equal bytes. None where nobody takes any."""
        ...

    def take_rows(self, values: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """Rows ``[N, h]`` of ``values [T, h]``."""
        ...

    def sum_segments(self, values: torch.Tensor, items: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Sum ``i`` of the result is that of the rows ``items[starts[i]:starts[i + 1]]``, in fp32, rounded once."""
        ...


class TorchBulk:
    """See :class:`Bulk`: the reference, and what a CPU runs."""

    name = "torch"

    def copy(self, pairs: Sequence[Pair]) -> None:
        """See the protocol."""
        for source, target in pairs:
            target.copy_(source)

    def scale(self, groups: Sequence[Sequence[torch.Tensor]], factors: Sequence[Factor]) -> None:
        """See the protocol."""
        for gradients, factor in zip(groups, factors, strict=True):
            for gradient in gradients:  # _foreach_mul_ rounds the factor, of bf16 on a CPU
                gradient.mul_(factor)

    def pack(self, gradients: Sequence[torch.Tensor], wire: torch.Tensor) -> None:
        """See the protocol."""
        for gradient, part in zip(gradients, wire.split([g.numel() for g in gradients]), strict=True):
            part.copy_(gradient)

    def unpack(self, wire: torch.Tensor, gradients: Sequence[torch.Tensor], *, add: bool) -> None:
        """See the protocol."""
        for gradient, part in zip(gradients, wire.split([g.numel() for g in gradients]), strict=True):
            if add:
                gradient.add_(part)
            else:
                gradient.copy_(part)

    def checksums(self, pages: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """See the protocol: bytes in host memory have checksums of their own, see ``paging/disk.py``."""
        return None

    def take_rows(self, values: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        return values.index_select(0, index_N)

    def sum_segments(self, values: torch.Tensor, items: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        return F.embedding_bag(items, values, starts, mode="sum")


TORCH = TorchBulk()


def bulk_for(device: torch.device, *, choice: BackendChoice = "auto") -> Bulk:
    """Who does bulk work on ``device``. Where kernels are asked for and cannot run they refuse what they are given."""
    if choice == "torch" or (choice == "auto" and (device.type != "cuda" or find_spec("triton") is None)):
        return TORCH
    from megascale_omni.kernels.bulk import KernelBulk

    return KernelBulk()


def on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Numbers on a device, in a copy that nothing waits for."""
    with torch.inference_mode(False):  # what an evaluation makes is used in training
        found = torch.from_numpy(numbers)
        return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
