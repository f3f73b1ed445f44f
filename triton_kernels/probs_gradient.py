"""Gradient of the routing probabilities, from the partial sums that the activation's backward leaves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.checks import require
from megascale_omni.kernels.tiles import TileConfig
from megascale_omni.kernels.wave import CHAIN_COLUMNS, ITEM_COLUMNS, WaveTables

COLUMNS = tl.constexpr(ITEM_COLUMNS)
CHAIN = tl.constexpr(CHAIN_COLUMNS)


@triton.jit(do_not_specialize=["wave_rows"], do_not_specialize_on_alignment=["items", "chains", "tiles"])
def probs_gradient(partials, out, items, chains, tiles, wave_rows, TILE: tl.constexpr, BM: tl.constexpr):
    """Adds the partial sums of every token's pages to its gradient.

    Formula: out[token] += sum over pages s, then tiles j of s, of partials[j, row of the token in s].
    Shapes: partials fp32 [tiles of r, rows of the wave], out fp32 [N].
    Layout: a tile has TILE neurons. Pages and tiles ascending, one after the other: the order that any cut into waves
        has. A program is BM tokens of one expert.
    """
    chain = chains + tl.load(tiles + 2 * tl.program_id(0)) * CHAIN
    rm = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, BM)
    in_m = rm < tl.load(chain + 3)
    into = out + tl.load(chain + 2) + rm
    total = tl.load(into, mask=in_m, other=0.0)
    first, count = tl.load(chain).to(tl.int32), tl.load(chain + 1).to(tl.int32)
    for number in range(first, first + count):
        row = items + number * COLUMNS
        neurons = tl.load(row + 6).to(tl.int32)
        source = partials + tl.load(row + 4) + rm
        for _ in range(tl.cdiv(neurons, TILE)):
            total += tl.load(source, mask=in_m, other=0.0)
            source += wave_rows
    tl.store(into, total, mask=in_m)


def launch_probs_gradient(
    *, partials: torch.Tensor, out: torch.Tensor, wave: WaveTables, rows: int, tile: TileConfig
) -> None:
    """Adds to ``out [N]``; ``rows`` tokens are a tile of the wave, ``tile`` is that of the kernel before.

    See :func:`probs_gradient`. Raises ValueError for a tensor that does not fit.
    """
    device = wave.items.device
    wave.require_tiles("rows", rows, of_chains=True)
    n_tiles = triton.cdiv(wave.neurons, tile.n)
    require("partials", partials, dtype=torch.float32, device=device, shape=(n_tiles, wave.rows))
    require("out", out, dtype=torch.float32, device=device, shape=(None,), rows=wave.tokens)
    if not wave.rows:
        return
    probs_gradient[(wave.chain_tiles.shape[0],)](
        partials, out, wave.items, wave.chains, wave.chain_tiles, wave.rows, TILE=tile.n, BM=rows
    )
