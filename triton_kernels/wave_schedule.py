"""The tables of a wave that has all pages of a module, made on the device from the numbers of tokens there.

[Note: schedules on the device]
Where every page is resident the host need not know which experts have tokens: how many tiles there can be at most
follows from the number of rows, ``sum of ceil(n_e / m) <= (N + e (m - 1)) / m`` for the ``e <= min(E, N)`` experts that
have any. So many are launched; what is left over belongs to an item without neurons (a chain without rows) behind the
others, at which a program ends. An expert without tokens has no tiles and, as far as kernels see, no neurons, so that
its gradient page is not touched. Everything else is what :func:`megascale_omni.kernels.wave.wave_tables` would make of
the same numbers: the same tiles in the same order, and so the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.wave import CHAIN_COLUMNS, ITEM_COLUMNS, WaveTables
from megascale_omni.paging.layout import PageLayout

COLUMNS = tl.constexpr(ITEM_COLUMNS)
CHAIN = tl.constexpr(CHAIN_COLUMNS)
FILL = 128


@triton.jit
def fill_tiles(tiles, first, count, owner, STEP: tl.constexpr, FILL: tl.constexpr):
    """Writes ``count`` tiles (owner, 0), (owner, STEP), ... from tile ``first`` on."""
    at = tl.arange(0, FILL)
    for begin in range(0, count.to(tl.int32), FILL):
        place = tiles + 2 * (first + begin + at)
        inside = begin + at < count
        tl.store(place, tl.zeros((FILL,), dtype=tl.int32) + owner, mask=inside)
        tl.store(place + 1, (begin + at) * STEP, mask=inside)


@triton.jit(do_not_specialize=["experts", "slices", "ffn", "rows", "limit", "num_tiles", "num_chain_tiles"])
def wave_schedule(
    counts,
    weights,
    gradients,
    written,
    items,
    chains,
    tiles,
    chain_tiles,
    experts,
    slices,
    ffn,
    rows,
    limit,
    num_tiles,
    num_chain_tiles,
    GRADIENT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    FILL: tl.constexpr,
):
    """Items, chains and tiles of all pages of a module.

    Formula: expert e has n_e = counts[e] tokens from row N_e = sum of n_j over j < e on; tile t of a page of it begins
        at row BM t of these, t < ceil(n_e / BM).
    Shapes: counts int64 [E] (E = ``experts`` <= EXPERTS), weights and gradients int64 [E S] (addresses, S =
        ``slices``), written int64 [E] (tokens that gradient pages hold so far), items [E S + 1, 8], chains [E + 1, 6],
        tiles int32 [num_tiles, 2], chain_tiles int32 [num_chain_tiles, 2].
    Layout: as in wave.py, ``rows`` neurons a page and ``ffn`` an expert. The last item and chain are nobody's, and have
        all tiles that are left over. Where there are more tokens than ``limit`` nobody has any. A gradient page of an
        expert whose ``written`` is 0 is replaced; tokens are added to it. A program is one expert, the last one what is
        left over.
    """
    e = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    n = tl.load(counts + at, mask=at < experts, other=0)
    n = tl.where(tl.sum(n, axis=0) <= limit, n, 0)
    page_tiles = (n + (BM - 1)) // BM
    sum_tiles = (n + (BC - 1)) // BC
    mine, first = tl.sum(tl.where(at == e, n, 0), axis=0), tl.sum(tl.where(at < e, n, 0), axis=0)
    own, before = tl.sum(tl.where(at == e, page_tiles, 0), axis=0), tl.sum(tl.where(at < e, page_tiles, 0), axis=0)
    own_sums = tl.sum(tl.where(at == e, sum_tiles, 0), axis=0)
    sums_before = tl.sum(tl.where(at < e, sum_tiles, 0), axis=0)
    chain = chains + e * CHAIN
    tl.store(chain + 2, first)
    tl.store(chain + 3, mine)
    tl.store(chain + 4, 1)
    tl.store(chain + 5, 1)
    tl.store(chain, (e * slices).to(tl.int64))
    if e == experts:
        tl.store(chain + 1, 0)
        row = items + e * slices * COLUMNS
        for column in tl.static_range(COLUMNS):
            tl.store(row + column, 0)
        fill_tiles(tiles, slices * before, num_tiles - slices * before, e * slices, 0, FILL)
        fill_tiles(chain_tiles, sums_before, num_chain_tiles - sums_before, e, 0, FILL)
    else:
        tl.store(chain + 1, slices.to(tl.int64))
        fresh = 0
        if GRADIENT:
            earlier = tl.load(written + e)
            fresh = (earlier == 0).to(tl.int32)
            tl.store(written + e, earlier + mine)
        for s in range(slices):
            item = e * slices + s
            row = items + item * COLUMNS
            neurons = tl.where(mine > 0, tl.minimum(rows, ffn - s * rows), 0)
            block = first * ffn + mine * rows * s
            tl.store(row, tl.load(weights + item))
            tl.store(row + 1, first)
            tl.store(row + 2, mine)
            tl.store(row + 3, block)
            tl.store(row + 4, first * slices + mine * s)
            tl.store(row + 5, block)
            tl.store(row + 6, neurons.to(tl.int64))
            if GRADIENT:
                tl.store(row + 7, tl.load(gradients + item) + fresh)
            else:
                tl.store(row + 7, 0)
            fill_tiles(tiles, slices * before + s * own, own, item, BM, FILL)
        fill_tiles(chain_tiles, sums_before, own_sums, e, BC, FILL)


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles of ``tile_rows`` rows that ``num_rows`` rows of ``num_experts`` experts can have."""
    return (num_rows + min(num_rows, num_experts) * (tile_rows - 1)) // tile_rows


def whole_wave_tables(
    counts_E: torch.Tensor,
    weights_I: torch.Tensor,
    gradients_I: torch.Tensor | None,
    written_E: torch.Tensor | None,
    *,
    layout: PageLayout,
    num_rows: int,
    item_rows: int,
    chain_rows: int,
) -> WaveTables:
    """Tables of all pages of a module for at most ``num_rows`` rows; nothing waits for them.

    ``counts_E`` int64 ``[E]`` are tokens, ``weights_I`` and ``gradients_I`` int64 ``[E S]`` addresses of pages,
    ``written_E`` int64 ``[E]`` tells what gradient pages hold and is brought up to date. Raises ValueError for a tensor
    that does not fit.
    """
    device, experts, slices = counts_E.device, counts_E.shape[0], layout.num_slices
    require("counts", counts_E, dtype=torch.int64, device=device, shape=(None,))
    require("weights", weights_I, dtype=torch.int64, device=device, shape=(experts * slices,))
    if (gradients_I is None) != (written_E is None):
        raise ValueError("gradients and written: one is missing; give both, or none where no gradient is wanted")
    if gradients_I is not None and written_E is not None:
        require("gradients", gradients_I, dtype=torch.int64, device=device, shape=(experts * slices,))
        require("written", written_E, dtype=torch.int64, device=device, shape=(experts,))
    tiles = slices * most_tiles(num_rows, experts, item_rows)
    chain_tiles = most_tiles(num_rows, experts, chain_rows)
    tables = WaveTables(
        items=torch.empty(experts * slices + 1, ITEM_COLUMNS, dtype=torch.int64, device=device),
        chains=torch.empty(experts + 1, CHAIN_COLUMNS, dtype=torch.int64, device=device),
        tiles=torch.empty(tiles, 2, dtype=torch.int32, device=device),
        chain_tiles=torch.empty(chain_tiles, 2, dtype=torch.int32, device=device),
        rows=num_rows * slices,
        neurons=layout.rows_of(0),
        block=num_rows * layout.shape.ffn,
        divisible=layout.rows % 16 == 0 and layout.shape.ffn % 16 == 0,
        tokens=num_rows,
        flat=num_rows * layout.shape.ffn,
        cut=0,
        item_rows=item_rows,
        chain_rows=chain_rows,
        without_gradient=None if gradients_I is not None else "the module",
    )
    wave_schedule[(experts + 1,)](
        counts_E,
        weights_I,
        gradients_I,
        written_E,
        tables.items,
        tables.chains,
        tables.tiles,
        tables.chain_tiles,
        experts,
        slices,
        layout.shape.ffn,
        layout.rows,
        num_rows,
        tiles,
        chain_tiles,
        GRADIENT=gradients_I is not None,
        EXPERTS=triton.next_power_of_2(experts),
        BM=item_rows,
        BC=chain_rows,
        FILL=FILL,
    )
    return tables
