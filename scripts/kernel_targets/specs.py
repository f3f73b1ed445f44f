"""What is compiled: every kernel as it ships, with the arguments that a launch would have.

A type is written as in Triton, ``*bf16`` a pointer, ``i32`` a number; ``:16`` says that it is divisible by 16, which a
launch finds out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import triton.language as tl

from megascale_omni.kernels import (
    bf16_wire,
    gradient_statistics,
    page_checksum,
    page_copy,
    paged_activation_backward,
    paged_adam,
    paged_fc1,
    paged_slice_sum,
    paged_weight_gradient,
    permute_rows,
    probs_gradient,
    scaled_clip,
    wave_schedule,
)
from megascale_omni.kernels.tiles import GROUP, TileConfig, tiles_for

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
TABLE, TILES, HIDDEN = "*i64", "*i32", "i32:16"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Arguments = dict[str, object]


@dataclass(frozen=True)
class Spec:
    """A kernel with its arguments (types, or values of constants) and launch options, for one target.

    ``products``: whether it must use the target's matrix instructions, with operands copied ahead. ``exact``: whether
    its PTX must keep subnormal numbers and IEEE division. ``wide``: whether it must move 16 bytes at a time.
    """

    kernel: Callable[..., object]
    tag: str
    target: str
    arguments: Arguments
    options: dict[str, object] = field(default_factory=dict)
    products: bool = False
    exact: bool = False
    wide: bool = True


def _tile(tile: TileConfig) -> Arguments:
    return {"BM": tile.m, "BN": tile.n, "BK": tile.k, "GROUP": GROUP}


_GRID: Arguments = {"sources": "i32", "row_tiles": "i32", "columns": "i32"}


def _activation(kind: str, gated: bool, clamp: float | None = None) -> Arguments:
    offset = 0.0 if clamp is None else 1.0
    return {"KIND": kind, "GATED": gated, "ALPHA": 1.702, "CLAMP": clamp, "OFFSET": offset}


def _products(target: str) -> Iterator[Spec]:
    for name, dtype in DTYPES.items():
        tiles, data = tiles_for(dtype, target=target), f"*{name}:16"
        common: Arguments = {"hidden": HIDDEN, "PRECISION": "ieee"}
        variants: list[tuple[str, bool, float | None, bool]] = [("silu", True, None, True)]
        if name == "bf16":
            variants += [("gelu", False, None, True), ("quick_gelu", True, 7.0, True), ("silu", True, None, False)]
        for kind, gated, clamp, divisible in variants:
            tag = f"{name} {kind}{' gated' if gated else ''}{'' if divisible else ' odd'}"
            shape = _activation(kind, gated, clamp) | common | {"DIVISIBLE": divisible}
            yield Spec(
                paged_fc1.paged_fc1,
                f"paged_fc1 {tag}",
                target,
                _GRID
                | {"x": data, "index": None, "probs": "*fp32:16", "pre": data, "activated": data, "items": TABLE}
                | {"tiles": TILES, "BIAS": clamp is not None, "INDEX": False, "PROBS": True, "SAVE": True}
                | shape
                | _tile(tiles.fc1),
                dict(tiles.fc1.launch),
                products=name == "bf16",
                wide=divisible,
            )
            yield Spec(
                paged_activation_backward.paged_activation_backward,
                f"paged_activation_backward {tag}",
                target,
                _GRID
                | {
                    "grad_y": data,
                    "index": None,
                    "INDEX": False,
                    "probs": "*fp32:16",
                    "pre": data,
                    "activated": data,
                    "grad_pre": data,
                }
                | {"partials": "*fp32:16", "items": TABLE, "tiles": TILES, "wave_rows": "i32", "PROBS": True}
                | {"ACTIVATED": True, "PARTIALS": True, "WIDE_PROBS": True}
                | shape
                | _tile(tiles.activation_backward),
                dict(tiles.activation_backward.launch),
                products=name == "bf16",
                wide=divisible,
            )
        yield from _sums(target, name, common)
    yield from _gathered(target)


def _sums(target: str, name: str, common: Arguments) -> Iterator[Spec]:
    tiles, data = tiles_for(DTYPES[name], target=target), f"*{name}:16"
    for matrix, wide, skip in (("down", 1, 2), ("fc1", 2, 0)):
        part: Arguments = {"WIDE": wide, "SKIP": skip, "DIVISIBLE": True}
        yield Spec(
            paged_slice_sum.paged_slice_sum,
            f"paged_slice_sum {name} {matrix}",
            target,
            _GRID
            | {"left": data, "out": data, "carried_in": "*fp32:16", "carried_out": "*fp32:16", "items": TABLE}
            | {"chains": TABLE, "tiles": TILES}
            | common
            | part
            | _tile(tiles.slice_sum),
            dict(tiles.slice_sum.launch),
            products=name == "bf16",
        )
        yield Spec(
            paged_weight_gradient.paged_weight_gradient,
            f"paged_weight_gradient {name} {matrix}",
            target,
            _GRID
            | {"left": data, "right": data, "index": None, "items": TABLE, "num_items": "i32", "INDEX": False}
            | {"GRADIENT": tl.float32, "ROUNDED": True}
            | common
            | part
            | _tile(tiles.weight_gradient),
            dict(tiles.weight_gradient.launch),
            products=name == "bf16",
        )


def _gathered(target: str) -> Iterator[Spec]:
    """What reads tokens by index, as a run does where tokens and experts are on one rank."""
    tiles = tiles_for(torch.bfloat16, target=target)
    data: Arguments = _GRID | {"index": "*i64:16", "INDEX": True, "items": TABLE, "tiles": TILES, "hidden": HIDDEN}
    data |= {"DIVISIBLE": True, "PRECISION": "ieee"}
    acting: Arguments = data | {"probs": "*fp32:16", "PROBS": True} | _activation("silu", True)
    yield Spec(
        paged_fc1.paged_fc1,
        "paged_fc1 bf16 silu gated by index",
        target,
        acting
        | {"x": "*bf16:16", "pre": "*bf16:16", "activated": "*bf16:16", "BIAS": False, "SAVE": True}
        | _tile(tiles.fc1),
        dict(tiles.fc1.launch),
        products=True,
    )
    yield Spec(
        paged_activation_backward.paged_activation_backward,
        "paged_activation_backward bf16 silu gated by index",
        target,
        acting
        | {"grad_y": "*bf16:16", "pre": "*bf16:16", "activated": "*bf16:16", "grad_pre": "*bf16:16"}
        | {"partials": "*fp32:16", "wave_rows": "i32", "ACTIVATED": True, "PARTIALS": True, "WIDE_PROBS": True}
        | _tile(tiles.activation_backward),
        dict(tiles.activation_backward.launch),
        products=True,
    )
    for matrix, wide, skip in (("down", 1, 2), ("fc1", 2, 0)):
        yield Spec(
            paged_weight_gradient.paged_weight_gradient,
            f"paged_weight_gradient bf16 {matrix} by index",
            target,
            data
            | {"left": "*bf16:16", "right": "*bf16:16", "num_items": "i32", "GRADIENT": tl.float32, "ROUNDED": True}
            | {"WIDE": wide, "SKIP": skip}
            | _tile(tiles.weight_gradient_by_index),
            dict(tiles.weight_gradient_by_index.launch),
            products=True,
        )


def _elementwise(target: str) -> Iterator[Spec]:
    yield Spec(
        probs_gradient.probs_gradient,
        "probs_gradient",
        target,
        {"partials": "*fp32:16", "out": "*fp32:16", "items": TABLE, "chains": TABLE, "tiles": TILES, "wave_rows": "i32"}
        | {"TILE": 64, "BM": 128},
        wide=False,
    )
    yield Spec(
        wave_schedule.wave_schedule,
        "wave_schedule",
        target,
        dict.fromkeys(("counts", "weights", "gradients", "written", "items", "chains"), TABLE)
        | dict.fromkeys(("tiles", "chain_tiles"), TILES)
        | dict.fromkeys(("experts", "slices", "ffn", "rows", "limit", "num_tiles", "num_chain_tiles"), "i32")
        | {"GRADIENT": True, "EXPERTS": 256, "BM": 64, "BC": 128, "FILL": wave_schedule.FILL},
        wide=False,
    )
    for decoupled in (True, False):
        yield Spec(
            paged_adam.paged_adam,
            f"paged_adam {'decoupled' if decoupled else 'l2'}",
            target,
            {
                "segments": TABLE,
                "blocks": TABLE,
                "records": "*fp32",
                "clip": "fp32",
                "stop": "*i32",
                "DECOUPLED": decoupled,
                "CLIP": True,
                "STOP": True,
            }
            | {"GRADIENT": tl.bfloat16, "WEIGHT": tl.bfloat16, "ALIGNED": True, "BLOCK": paged_adam.BLOCK},
            {"num_warps": 4, "enable_fp_fusion": False},  # as it is launched
            exact=True,
        )
    pages: Arguments = {"ALIGNED": True}
    yield Spec(
        page_copy.page_copy, "page_copy", target, {"addresses": TABLE, "words": "i32:16", "BLOCK": page_copy.BLOCK}
    )
    yield Spec(
        page_checksum.page_checksum,
        "page_checksum",
        target,
        {"pages": TABLE, "blocks": TABLE, "out": "*i64:16", "ALIGNED": True, "BLOCK": page_checksum.BLOCK},
    )
    yield Spec(
        gradient_statistics.gradient_statistics,
        "gradient_statistics",
        target,
        {"segments": TABLE, "chunks": TABLE, "partials": "*fp64:16", "GRADIENT": tl.float32}
        | {"CHUNK": gradient_statistics.CHUNK, "BLOCK": gradient_statistics.BLOCK}
        | pages,
    )
    yield Spec(
        gradient_statistics.add_statistics,
        "add_statistics",
        target,
        {"partials": "*fp64:16", "bounds": "*i64:16", "out": "*fp64:16", "BLOCK": 256},
        wide=False,
    )
    yield Spec(
        scaled_clip.scaled_clip,
        "scaled_clip",
        target,
        {"segments": TABLE, "blocks": TABLE, "coefficients": "*fp32:16", "GRADIENT": tl.bfloat16}
        | {"BLOCK": scaled_clip.BLOCK}
        | pages,
    )
    for pack in (True, False):
        yield Spec(
            bf16_wire.bf16_wire,
            f"bf16_wire {'pack' if pack else 'add'}",
            target,
            {"segments": TABLE, "blocks": TABLE, "wire": "*bf16:16", "PACK": pack, "ADD": not pack}
            | {"BLOCK": bf16_wire.BLOCK}
            | pages,
        )
    rows: Arguments = {"rows": "i32", "hidden": HIDDEN, "BLOCK": permute_rows.BLOCK}
    yield Spec(
        permute_rows.permute_rows,
        "permute_rows",
        target,
        {"x": "*bf16:16", "source": "*i32:16", "scale": "*fp32:16", "out": "*bf16:16", "SCALE": True} | rows,
    )
    for each in (True, False):
        yield Spec(
            permute_rows.unpermute_rows,
            f"unpermute_rows{' each' if each else ''}",
            target,
            {"y": "*bf16:16", "position": "*i64:16", "weight": "*fp32:16", "out": "*bf16:16", "TOPK": 8}
            | {"WEIGHT": True, "PRODUCT": tl.bfloat16, "EACH": each}
            | rows,
            {"enable_fp_fusion": False},
        )
    yield Spec(
        permute_rows.sum_rows,
        "sum_rows",
        target,
        {"y": "*bf16:16", "order": "*i64:16", "bounds": "*i64:16", "out": "*bf16:16", "tokens": "i32"} | rows,
    )
    yield Spec(
        permute_rows.row_products,
        "row_products",
        target,
        {"y": "*bf16:16", "position": "*i32:16", "grad": "*bf16:16", "out": "*fp32:16", "TOPK": 8} | rows,
    )


def specs(target: str) -> tuple[Spec, ...]:
    """Every kernel for a target."""
    return (*_products(target), *_elementwise(target))
