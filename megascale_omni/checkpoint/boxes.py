"""Boxes: where a rank's piece of a tensor lies in the whole tensor.

A box is an offset and a shape. Everything that a checkpoint stores of dense tensors is boxes, however a framework cut
them: a contiguous range of a flattened tensor (a distributed optimizer's shard) is a few boxes, and what a new layout
needs is put together from the overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """``shape`` elements of a tensor from ``offset`` on, dimension by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box needs as many offsets as sizes, got {self.offset} and {self.shape}")

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def inside(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies in a tensor of ``shape``."""
        return len(shape) == len(self.shape) and all(
            start >= 0 and start + size <= whole
            for start, size, whole in zip(self.offset, self.shape, shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """The box that both contain, None where there is none."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(last <= first for first, last in zip(start, stop, strict=True)):
            return None if self.shape else Box((), ())
        return Box(start, tuple(last - first for first, last in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> Box:
        """The same box, its offset counted from that of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes whose elements, one box after the other, are ``start .. stop`` of the flattened tensor of ``shape``.

    At most ``2 * len(shape) - 1`` of them.

    Raises:
        ValueError: a range outside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}..{stop} lies outside a tensor of shape {shape}")
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:  # a part of one row
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start - first * row, row)
        first += 1
    rows = stop // row - first
    if rows:
        yield Box((first, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
    if stop % row:
        yield from _in_row(shape, stop // row, 0, stop % row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.offset), (1, *box.shape))


def cut(box: Box, *, max_numel: int) -> Iterator[Box]:
    """The box in pieces of at most ``max_numel`` elements, in the order of its elements."""
    if box.numel <= max_numel:
        yield box
        return
    for start in range(0, box.numel, max_numel):
        for piece in boxes_of_range(box.shape, start, min(start + max_numel, box.numel)):
            yield Box(tuple(map(sum, zip(box.offset, piece.offset, strict=True))), piece.shape)


def copy_overlap(*, source: torch.Tensor, source_box: Box, target: torch.Tensor, target_box: Box) -> int:
    """Copies the elements that both boxes contain; returns how many. Tensors have their boxes' shapes."""
    common = source_box.overlap(target_box)
    if common is None:
        return 0
    target[common.within(target_box).slices].copy_(source[common.within(source_box).slices])
    return common.numel
