"""Tile sizes of the paged products: fixed by dtype and device, never by timing: equal runs compute equal sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from megascale_omni.kernels.interpreter import is_interpreted

GROUP = 8
"""Rows of tiles that are worked on together, see :func:`tile_of`."""


@dataclass(frozen=True)
class TileConfig:
    """A tile of ``m x n`` outputs, summed in steps of ``k``; warps a program, stages of the load pipeline."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@triton.jit
def tile_of(program, rows, columns, GROUP: tl.constexpr):
    """(row, column) of a program in a grid of tiles: GROUP rows at a time, column after column of these.

    Programs that run at the same time share what they read, so that it comes from the cache: with all rows first, a
    product of many tokens would read all of them from memory once a column. Which program computes a tile changes no
    sum.
    """
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    within = program % (GROUP * columns)
    return first + within % size, within // size


@dataclass(frozen=True)
class ProductTiles:
    """Tiles of the products of a page; ``m`` is tokens in all but the weight gradients."""

    fc1: TileConfig
    slice_sum: TileConfig
    activation_backward: TileConfig
    weight_gradient: TileConfig
    weight_gradient_by_index: TileConfig
    """More stages: rows are copied ahead when their numbers have come."""


INTERPRETED = ProductTiles(*(TileConfig(16, 16, 16, 1, 1) for _ in range(5)))
"""Under the interpreter: the smallest tile of the matrix instructions, so that small tests have many of them."""

_NARROW = ProductTiles(
    fc1=TileConfig(128, 64, 64, 8, 3),
    slice_sum=TileConfig(128, 128, 64, 8, 3),
    activation_backward=TileConfig(64, 64, 64, 8, 3),
    weight_gradient=TileConfig(128, 128, 64, 8, 3),
    weight_gradient_by_index=TileConfig(128, 128, 64, 8, 5),
)
_NARROW_SM80 = replace(_NARROW, slice_sum=TileConfig(128, 128, 32, 8, 4))  # steps of 64 spill there
_FP32 = ProductTiles(
    fc1=TileConfig(64, 32, 32, 8, 2),
    slice_sum=TileConfig(64, 64, 16, 8, 2),
    activation_backward=TileConfig(64, 32, 32, 4, 2),
    weight_gradient=TileConfig(64, 64, 32, 8, 2),
    weight_gradient_by_index=TileConfig(64, 64, 32, 8, 4),
)


def tiles_for(dtype: torch.dtype, *, target: str) -> ProductTiles:
    """The tiles that ship for a dtype and a target: ``cuda:80``, ``cuda:90``, ``cuda:100`` or ``hip:gfx942``."""
    if dtype is torch.float32:
        tiles = _FP32
    else:
        tiles = _NARROW_SM80 if target in ("cuda:80", "cuda:86", "cuda:89") else _NARROW
    if target.startswith("hip"):  # warps are twice as wide, shared memory is 64 KiB
        tiles = ProductTiles(
            fc1=replace(tiles.fc1, warps=4, stages=2),
            slice_sum=replace(tiles.slice_sum, warps=4, stages=2),
            activation_backward=replace(tiles.activation_backward, warps=4, stages=2),
            weight_gradient=replace(tiles.weight_gradient, stages=2),
            weight_gradient_by_index=replace(tiles.weight_gradient, stages=2),
        )
    return tiles


def product_tiles(dtype: torch.dtype, device: torch.device) -> ProductTiles:
    """The tiles of a dtype on a device; the interpreter's where kernels are interpreted."""
    if is_interpreted():
        return INTERPRETED
    if torch.version.hip is not None:
        return tiles_for(dtype, target="hip:gfx942")
    major, minor = torch.cuda.get_device_capability(device)
    return tiles_for(dtype, target=f"cuda:{10 * major + minor}")
