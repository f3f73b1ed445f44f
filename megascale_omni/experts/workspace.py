"""Reused scratch memory. Fresh buffers page-fault at every call, which for small experts costs more than products."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Flat buffers by (name, dtype), each as large as the largest request so far.

    A buffer is valid until the next :meth:`take` of the same name; two live buffers need two names. What must stay
    valid for longer, like what a forward keeps for its backward, is lent and given back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._given_back: list[torch.Tensor] = []  # the longest there first

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer of ``shape``; its contents are whatever was there."""
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[name, dtype] = self._new(numel, dtype)
        return buffer[:numel].view(shape)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer of ``numel`` elements or up to an eighth more, the borrower's until :meth:`give_back`.

        A borrower may also drop it. There are never more buffers than were lent at once.
        """
        granule = 1 << max(0, numel.bit_length() - 4)
        rounded = -(-numel // granule) * granule
        for number, buffer in enumerate(self._given_back):
            if buffer.numel() == rounded and buffer.dtype is dtype:
                return self._given_back.pop(number)
        if self._given_back:
            self._given_back.pop(0)
        return self._new(rounded, dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Ends a loan. Raises RuntimeError where the buffer has been given back already."""
        if any(buffer is there for there in self._given_back):
            raise RuntimeError("a buffer is given back twice")
        self._given_back.append(buffer)

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # a buffer made during an evaluation is used in training
            return torch.empty(numel, dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes held; what is lent is its borrower's."""
        return sum(b.numel() * b.element_size() for b in [*self._buffers.values(), *self._given_back])

    def clear(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()
        self._given_back.clear()
