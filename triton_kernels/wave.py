"""What the paged products of one wave work on, as tables that kernels read.

[Note: wave tables]
A wave is a list of pages (expert, slice), ascending. Kernels never see page ids: each row of ``items`` holds a page's
address and where its tokens and blocks lie, so that one launch serves all pages, wherever the arena keeps them. A row
of ``chains`` is an expert's consecutive pages in the wave, whose products are summed in slice order; a chain that does
not begin with slice 0 goes on from a carried fp32 sum, and one that does not end with the last slice leaves one. A
carried sum is the accumulator itself, stored and loaded, so that where a wave ends changes no bit.

Rows are counted in the order of tokens sorted by expert (N), or in the wave (each page's rows one after the other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megascale_omni.kernels.checks import require_address
from megascale_omni.kernels.segments import upload

ITEM_COLUMNS = 8
"""address of the weight page, first row (N), rows, block (elements of width 1 before it, N), first row (wave), block
(wave), neurons, address of the gradient page with 1 added where its contents are to be replaced."""
CHAIN_COLUMNS = 6
"""first item, items, first row (N), rows, whether it begins with slice 0, whether it ends with the last slice."""


@dataclass(frozen=True)
class WaveItem:
    """One page of a wave: its rows of tokens, its block of the pre-activations, its addresses (bytes; 0 for none)."""

    expert: int
    slice: int
    first_row: int
    rows: int
    block: int
    neurons: int
    weight_address: int
    gradient_address: int = 0
    fresh: bool = False


@dataclass(frozen=True)
class WaveTables:
    """The tables of one wave on the device; see [Note: wave tables]."""

    items: torch.Tensor  # int64 [I, ITEM_COLUMNS]
    chains: torch.Tensor  # int64 [C, CHAIN_COLUMNS]
    tiles: torch.Tensor  # int32 [T, 2]: (item, first row of the tile in the item)
    chain_tiles: torch.Tensor  # int32 [T', 2]: (chain, first row of the tile in the chain)
    rows: int
    neurons: int  # of the widest page
    block: int  # elements of width 1 of all blocks
    divisible: bool  # neurons of every page are multiples of 16: rows of blocks are read in whole words
    tokens: int  # rows of N up to the last one that the wave reads or writes
    flat: int  # elements of width 1 of the flat pre-activations, likewise
    cut: int  # rows of the longest chain that other waves begin or end
    item_rows: int  # rows of a tile
    chain_rows: int  # rows of a tile of a chain
    without_gradient: str | None  # a page that has no gradient page beside it

    @property
    def num_items(self) -> int:
        """Pages of the wave."""
        return self.items.shape[0]

    def require_tiles(self, name: str, rows: int, *, of_chains: bool = False) -> None:
        """Refuses a tile of other rows than the tables are made for. Raises ValueError."""
        made = self.chain_rows if of_chains else self.item_rows
        if rows != made:
            raise ValueError(f"{name}: {rows} rows a tile, the wave's tables are made for {made}")


def wave_tables(
    items: Sequence[WaveItem], *, last_slice: int, item_rows: int, chain_rows: int, device: torch.device
) -> WaveTables:
    """Builds a wave's tables, for tiles of ``item_rows`` rows of a page and ``chain_rows`` rows of an expert.

    Raises:
        ValueError: an address that is 0 or not aligned, pages that do not ascend, sizes that cannot be.
    """
    _check_order(items)
    table = np.zeros((len(items), ITEM_COLUMNS), dtype=np.int64)
    chains: list[list[int]] = []
    row = block = 0
    for number, item in enumerate(items):
        require_address(f"weight page of {_name(item)}", item.weight_address)
        gradient = item.gradient_address
        if gradient:
            require_address(f"gradient page of {_name(item)}", gradient)
        table[number] = (
            item.weight_address,
            item.first_row,
            item.rows,
            item.block,
            row,
            block,
            item.neurons,
            gradient + int(item.fresh),
        )
        if number and items[number - 1].expert == item.expert:
            chains[-1][1] += 1
            chains[-1][5] = int(item.slice == last_slice)
        else:
            ends = int(item.slice == last_slice)
            chains.append([number, 1, item.first_row, item.rows, int(item.slice == 0), ends])
        row += item.rows
        block += item.rows * item.neurons
    chain_table = np.asarray(chains, dtype=np.int64).reshape(-1, CHAIN_COLUMNS)
    tiles, chain_tiles = _tiles(table[:, 2], item_rows), _tiles(chain_table[:, 3], chain_rows)
    there = upload(device, table, chain_table, tiles, chain_tiles)
    return WaveTables(
        items=there[0],
        chains=there[1],
        tiles=there[2],
        chain_tiles=there[3],
        rows=row,
        neurons=max((item.neurons for item in items), default=0),
        block=block,
        divisible=all(item.neurons % 16 == 0 and item.block % 16 == 0 for item in items),
        tokens=max((item.first_row + item.rows for item in items), default=0),
        flat=max((item.block + item.rows * item.neurons for item in items), default=0),
        cut=max((chain[3] for chain in chains if not (chain[4] and chain[5])), default=0),
        item_rows=item_rows,
        chain_rows=chain_rows,
        without_gradient=next((_name(item) for item in items if not item.gradient_address), None),
    )


def _name(item: WaveItem) -> str:
    return f"expert {item.expert}, slice {item.slice}"


def _check_order(items: Sequence[WaveItem]) -> None:
    """Sums run over the slices of an expert in ascending order, each once."""
    for number, item in enumerate(items):
        if min(item.first_row, item.rows, item.block) < 0 or item.neurons < 1:
            raise ValueError(f"items: {_name(item)} has rows, a block or neurons that cannot be: {item}")
        if number:
            before = items[number - 1]
            follows = item.slice == before.slice + 1 if item.expert == before.expert else item.expert > before.expert
            if not follows:
                raise ValueError(f"items: {_name(item)} comes after {_name(before)}; pages of a wave must ascend")


def _tiles(rows: np.ndarray, block_rows: int) -> np.ndarray:
    """(owner, first row) of every tile, owners ascending."""
    counts = -(-rows // block_rows)
    owner = np.repeat(np.arange(len(rows)), counts)
    first = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owner, first * block_rows], axis=1).astype(np.int32)
