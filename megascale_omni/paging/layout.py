"""How an expert's tensors are cut into pages.

[Note: page = slice of neurons]
An expert is ``y = act(x Wg^T + bg) * (x Wu^T + bu) Wd^T + bd`` (``act(x Wu^T + bu) Wd^T + bd`` where ungated) with
``Wg, Wu: [f, h]``, ``Wd: [h, f]``, ``bg, bu: [f]``, ``bd: [h]``. It is cut along ``f``, its hidden neurons: page
``j`` holds, for ``r`` consecutive neurons, their rows of ``Wg`` and ``Wu`` and their columns of ``Wd`` stored as
rows. The sum over neurons becomes a sum over pages, so that a page is a unit of computation, io, optimizer state,
checkpoint and migration at once.

A page is one flat tensor, in this order (M = 3 where gated, 2 where ungated):

    matrices [M, r, h]   gate rows (gated only), up rows, down rows
    biases   [M - 1, r]  gate and up bias (with bias only)
    down     [h]         the down bias (with bias, slice 0 only; added once)

All pages of a module have slots of one size; the last page of an expert may be short and then leaves the tail unused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cache, cached_property

import torch

KIB = 1024
MIB = 1024 * KIB
MIN_PAGE_BYTES = 64 * KIB
MAX_PAGE_BYTES = 64 * MIB
DEFAULT_PAGE_BYTES = 16 * MIB
SLOT_ALIGNMENT = 4096
"""Bytes; slots begin and end at multiples of it, which direct io asks for."""
ROW_TILE = 16
"""Neurons of a page are a multiple of this (the smallest matrix-instruction tile), unless a page is a whole expert."""


class Part(enum.Enum):
    """A named piece of a page: one matrix or one bias."""

    GATE = "gate"  # [r, h], gated only
    UP = "up"  # [r, h]
    DOWN = "down"  # [r, h]: columns of the down projection, stored as rows
    GATE_BIAS = "gate_bias"  # [r], gated only
    UP_BIAS = "up_bias"  # [r]
    DOWN_BIAS = "down_bias"  # [h], slice 0 only

    @property
    def is_bias(self) -> bool:
        """Biases follow the matrices in a page and may have an optimizer group of their own."""
        return self in (Part.GATE_BIAS, Part.UP_BIAS, Part.DOWN_BIAS)


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert: ``hidden`` (h), ``ffn`` (f, neurons held on this rank), gated or not, with biases or not."""

    hidden: int
    ffn: int
    gated: bool
    bias: bool

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.ffn < 1:
            raise ValueError(f"an expert needs hidden >= 1 and ffn >= 1, got hidden={self.hidden}, ffn={self.ffn}")

    @property
    def num_matrices(self) -> int:
        """M: 3 where gated (gate, up, down), 2 where not (up, down)."""
        return 3 if self.gated else 2

    @property
    def num_parameters(self) -> int:
        """Elements of one expert, biases included."""
        weights = self.num_matrices * self.ffn * self.hidden
        return weights + ((self.num_matrices - 1) * self.ffn + self.hidden if self.bias else 0)


@dataclass(frozen=True)
class SlotClass:
    """Pages that fit each other's slots: same dtype, same number of elements."""

    dtype: torch.dtype
    numel: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.numel))

    def __hash__(self) -> int:
        return self._hash  # a key of dictionaries, thousands of times a step

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one slot, rounded up to the alignment."""
        return -(-self.numel * self.dtype.itemsize // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def stride(self) -> int:
        """Elements from one slot to the next."""
        return self.nbytes // self.dtype.itemsize


@cache
def _slot_class(dtype: torch.dtype, numel: int) -> SlotClass:
    """One object a class: equal keys of a dictionary that are the same need no comparison."""
    return SlotClass(dtype=dtype, numel=numel)


@dataclass(frozen=True)
class PageViews:
    """Views into one page: shapes as in [Note: page = slice of neurons]; biases None where absent."""

    fc1_Rh: torch.Tensor  # [(M-1) * r, h]: gate rows then up rows
    down_rh: torch.Tensor  # [r, h]
    fc1_bias_R: torch.Tensor | None  # [(M-1) * r]
    down_bias_h: torch.Tensor | None  # [h], slice 0 only


@dataclass(frozen=True)
class PageLayout:
    """The cut of one module's experts: ``rows`` neurons a page, ``num_slices`` pages an expert."""

    shape: ExpertShape
    rows: int

    @classmethod
    def for_page_bytes(cls, shape: ExpertShape, *, page_bytes: int, dtype: torch.dtype) -> PageLayout:
        """The fewest pages an expert whose weights have at most ``page_bytes`` bytes each, as equal as tiles allow.

        Raises:
            ValueError: ``page_bytes`` outside 64 KiB - 64 MiB, or too small for one tile of neurons of this expert.
        """
        if not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
            raise ValueError(
                f"page size {page_bytes} bytes is outside {MIN_PAGE_BYTES} (64 KiB) to {MAX_PAGE_BYTES} (64 MiB); "
                "choose one in between, e.g. --megascale-page-size 16MiB"
            )
        neuron_bytes = shape.num_matrices * shape.hidden * dtype.itemsize
        rows = min(page_bytes // neuron_bytes, shape.ffn)
        if rows < shape.ffn:
            rows -= rows % ROW_TILE
        if rows < min(ROW_TILE, shape.ffn):
            raise ValueError(
                f"page size {page_bytes} bytes does not hold {ROW_TILE} neurons of an expert with hidden size "
                f"{shape.hidden} ({neuron_bytes} bytes a neuron in {dtype}); the smallest page size that works is "
                f"{max(MIN_PAGE_BYTES, min(ROW_TILE, shape.ffn) * neuron_bytes)} bytes"
            )
        if rows < shape.ffn:  # no more slices than that, but of one size: a short last page wastes its slot's tail
            slices = -(-shape.ffn // rows)
            rows = -(-shape.ffn // (slices * ROW_TILE)) * ROW_TILE
        return cls(shape=shape, rows=rows)

    @property
    def num_slices(self) -> int:
        """Pages an expert."""
        return -(-self.shape.ffn // self.rows)

    @cached_property
    def slot_numel(self) -> int:
        """Elements of a slot: those of the largest page (slice 0)."""
        return self.page_numel(0)

    def slot_class(self, dtype: torch.dtype) -> SlotClass:
        """The slot class of this layout's pages in a plane of ``dtype``."""
        return _slot_class(dtype, self.slot_numel)

    def rows_of(self, slice_: int) -> int:
        """Neurons in a slice; only the last one may have fewer than ``rows``."""
        return min(self.rows, self.shape.ffn - slice_ * self.rows)

    def neurons(self, slice_: int) -> slice:
        """The neurons of a slice as a range of the expert's ffn dimension."""
        start = slice_ * self.rows
        return slice(start, start + self.rows_of(slice_))

    def matrix_numel(self, slice_: int) -> int:
        """Elements of a page's matrices ``[M, r, h]``; they are the head of the page."""
        return self.shape.num_matrices * self.rows_of(slice_) * self.shape.hidden

    def page_numel(self, slice_: int) -> int:
        """Elements of a page, biases included."""
        numel = self.matrix_numel(slice_)
        if self.shape.bias:
            numel += (self.shape.num_matrices - 1) * self.rows_of(slice_)
            numel += self.shape.hidden if slice_ == 0 else 0
        return numel

    def views(self, page: torch.Tensor, slice_: int) -> PageViews:
        """The operands of the products, as views of ``page`` (flat, at least ``page_numel(slice_)`` elements)."""
        r, h, m = self.rows_of(slice_), self.shape.hidden, self.shape.num_matrices
        fc1_numel = (m - 1) * r * h
        fc1 = page[:fc1_numel].view((m - 1) * r, h)
        down = page[fc1_numel : fc1_numel + r * h].view(r, h)
        if not self.shape.bias:
            return PageViews(fc1, down, None, None)
        tail = fc1_numel + r * h
        fc1_bias = page[tail : tail + (m - 1) * r]
        down_bias = page[tail + (m - 1) * r : tail + (m - 1) * r + h] if slice_ == 0 else None
        return PageViews(fc1, down, fc1_bias, down_bias)

    def parts(self, slice_: int) -> tuple[Part, ...]:
        """The parts that a slice has, in the order they lie in the page."""
        gated, bias = self.shape.gated, self.shape.bias
        parts = ([Part.GATE] if gated else []) + [Part.UP, Part.DOWN]
        if bias:
            parts += ([Part.GATE_BIAS] if gated else []) + [Part.UP_BIAS]
            parts += [Part.DOWN_BIAS] if slice_ == 0 else []
        return tuple(parts)

    def part(self, page: torch.Tensor, slice_: int, part: Part) -> torch.Tensor:
        """One part of a page as a view: a matrix ``[r, h]`` or a bias ``[r]`` (``[h]`` for the down bias)."""
        start = 0
        for candidate in self.parts(slice_):
            shape = self.part_shape(slice_, candidate)
            numel = shape[0] * (shape[1] if len(shape) == 2 else 1)
            if candidate is part:
                return page[start : start + numel].view(shape)
            start += numel
        raise RuntimeError(f"slice {slice_} has no part {part.value}: gated={self.shape.gated}, bias={self.shape.bias}")

    def part_shape(self, slice_: int, part: Part) -> tuple[int, ...]:
        """Shape of a part in slice ``slice_``."""
        if part is Part.DOWN_BIAS:
            return (self.shape.hidden,)
        r = self.rows_of(slice_)
        return (r,) if part.is_bias else (r, self.shape.hidden)
