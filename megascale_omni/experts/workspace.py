"""Reused scratch memory. Fresh buffers page-fault at every call, which for small experts costs more than products."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Flat buffers by (name, dtype), each as large as the largest request so far.

    A buffer is valid until the next :meth:`take` of the same name; two live buffers need two names.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer of ``shape``; its contents are whatever was there."""
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # a buffer made during an evaluation is used in training
                buffer = torch.empty(numel, dtype=dtype, device=self.device)
            self._buffers[name, dtype] = buffer
        return buffer[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def clear(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()
