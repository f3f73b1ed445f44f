"""Checkpoints of Megatron runs into Megatron's own format: weights, optimizer, random numbers, position.

FOLDER/latest_checkpointed_iteration.txt    the newest iteration
FOLDER/iter_0000100/common.pt               arguments, iteration, settings of the optimizer, schedule
FOLDER/iter_0000100/.metadata, *.distcp     tensors and ranks' random numbers
FOLDER/iter_0000100/metadata.json           the format's name
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.assemble import Source
from megascale_omni.checkpoint.datafile import NAMES
from megascale_omni.checkpoint.filesystem import LocalFileSystem, write_file
from megascale_omni.checkpoint.megatron_keys import (
    EXTRA,
    MASTER,
    MODEL,
    MOMENTS,
    OBJECT,
    OPTIMIZER,
    RNG,
    STATE,
    TRACKER,
    StockOptimizer,
    is_stacked,
    key_of_experts,
    rng_as_stock,
    tensors_of_expert,
)
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.checkpoint.pages_load import planes_of
from megascale_omni.checkpoint.torch_dist import write_files
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.names import NamedTensors
from megascale_omni.paging.planes import Plane

_VERSION = 3.0


def to_torch_dist(opened: Opened, target: Path) -> Path:
    """Adds the checkpoint to a folder of Megatron's checkpoints; returns the new one's folder.

    Raises:
        ValueError: not one of a Megatron run, or the folder has that iteration.
    """
    values = opened.manifest.values
    if "megatron-core" not in opened.manifest.versions or "run" not in values:
        raise ValueError(f"checkpoint {opened.folder} is not one of a Megatron run: its tensors have other names")
    final = target / f"iter_{opened.manifest.step:07d}"
    if final.exists():
        raise ValueError(f"{final} exists; give another folder")
    stock = _stock_optimizer(opened)
    tensors = dict(_dense_of(opened, stock))
    tensors.update(_experts_of(opened, stock))
    files = LocalFileSystem()
    target.mkdir(parents=True, exist_ok=True)
    draft = target / f".draft-{final.name}"
    if draft.exists():
        files.remove(draft)
    files.make_folder(draft)
    write_files(draft, tensors, {**dict(_empty_objects(opened)), **dict(_rng_objects(opened))})
    common = io.BytesIO()
    torch.save(_common(opened, stock), common)
    write_file(files, draft / "common.pt", common.getbuffer())
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    write_file(files, draft / "metadata.json", json.dumps(backend).encode())
    files.sync_folder(draft)
    files.rename(draft, final)
    part = target / f".{TRACKER}.part"
    if part.exists():
        files.remove(part)
    write_file(files, part, str(opened.manifest.step).encode())
    files.rename(part, target / TRACKER)
    files.sync_folder(target)
    return final


def _stock_optimizer(opened: Opened) -> StockOptimizer | None:
    values = opened.manifest.values
    if not values["optimizer"]:
        return None
    if values.get("stock") is None:
        raise ValueError(f"checkpoint {opened.folder} was saved by an older build, without its parameter groups")
    stock = values["stock"]
    return StockOptimizer(stock["form"], stock["separate"], stock["groups"], stock["steps"], values.get("clipping"))


def _source(opened: Opened, name: str) -> Source:
    parts = opened.dense.tensors[name]
    return Source(NAMES[parts[0].place.dtype], parts[0].global_shape, partial(opened.dense.read, name))


def _dense_of(opened: Opened, stock: StockOptimizer | None) -> Iterator[tuple[str, Source]]:
    for name in opened.dense.tensors:
        if name.startswith(MODEL):
            yield name.removeprefix(MODEL), _source(opened, name)
            continue
        if not name.startswith(OPTIMIZER) or stock is None:
            continue
        _, kind, key = name.split(".", 2)
        if kind in MOMENTS:
            yield f"{STATE}{kind}.{key}", _source(opened, name)
            if kind == MOMENTS[0] and stock.form in MASTER:
                master = f"{OPTIMIZER}param.{key}"
                master = master if master in opened.dense.tensors else MODEL + key  # in fp32 they are the weights
                yield f"{STATE}{MASTER[stock.form]}.{key}", _source(opened, master)


def _experts_of(opened: Opened, stock: StockOptimizer | None) -> Iterator[tuple[str, Source]]:
    """Tensors ``[layers, experts, ...]`` (or ``[experts, ...]``) of every plane."""
    layers = stacked = _num_layers(opened)
    found: dict[str, dict[int, str]] = {}
    for path in opened.pages.modules:
        key, layer = key_of_experts(path, "", stacked=bool(stacked))
        found.setdefault(key, {})[layer] = path
    for key, paths in found.items():
        if stacked and sorted(paths) != list(range(layers)):
            raise ValueError(f"checkpoint {opened.folder}: layers are stacked, but not all of {layers} have experts")
        module = opened.pages.modules[next(iter(paths.values()))]
        names = _names_of_one(module.shape)
        frozen = module.histories == (None, None)
        for theirs, ours in tensors_of_expert(names).items():
            for plane, prefix in _planes(opened, stock, frozen=frozen).items():
                read = partial(_stack, opened, paths, ours, plane, stacked=bool(stacked))
                tensor = next(t for t in names.tensors() if t.name == ours)
                lead = (layers, module.num_experts) if stacked else (module.num_experts,)
                yield f"{prefix}{key}{theirs}", Source(_dtype(opened, paths, plane), (*lead, *tensor.shape), read)


def _planes(opened: Opened, stock: StockOptimizer | None, *, frozen: bool) -> dict[Plane, str]:
    planes = {Plane.WEIGHT: ""}
    if stock is None or frozen:
        return planes
    planes |= {Plane.MOMENT1: f"{STATE}{MOMENTS[0]}.", Plane.MOMENT2: f"{STATE}{MOMENTS[1]}."}
    if stock.form in MASTER:
        planes[Plane.MASTER] = f"{STATE}{MASTER[stock.form]}."
    return planes


def _dtype(opened: Opened, paths: Mapping[int, str], plane: Plane) -> torch.dtype:
    if plane is not Plane.WEIGHT:
        return torch.float32
    page = opened.pages.pages[next(iter(paths.values())), 0][0]
    return NAMES[page.planes["weight"].dtype]


def _stack(opened: Opened, paths: Mapping[int, str], name: str, plane: Plane, *, stacked: bool) -> torch.Tensor:
    """A tensor of all experts of all layers, every step caught up."""
    dtype = _dtype(opened, paths, plane)
    rows = []
    for _, path in sorted(paths.items()):
        module = opened.pages.modules[path]
        names = _names_of_one(module.shape)
        experts = [_expert(opened, (path, e), names, name, plane, dtype) for e in range(module.num_experts)]
        rows.append(torch.stack(experts))
    return torch.stack(rows) if stacked else rows[0]


def _expert(
    opened: Opened, expert: tuple[str, int], names: NamedTensors, name: str, plane: Plane, dtype: torch.dtype
) -> torch.Tensor:
    """A named tensor of an expert; zeros where its plane is not stored, and masters made of the weights."""
    planes = planes_of(opened.pages, expert, slice(0, names.layout.shape.ffn), catch_up=True)
    page = planes.get(plane)
    if page is None and plane is Plane.MASTER:
        page = planes[Plane.WEIGHT].float()
    out = torch.zeros(next(t.shape for t in names.tensors() if t.name == name), dtype=dtype)
    if page is not None:
        names.gather({(0, 0): page}, {name: out})
    return out


def _names_of_one(shape: ExpertShape) -> NamedTensors:
    return NamedTensors(layout=PageLayout(shape, shape.ffn), num_experts=1, style="sequential")


def _rng_objects(opened: Opened) -> Iterator[tuple[str, object]]:
    """Megatron keeps a pipeline and tensor rank's numbers, with expert parallelism a data-parallel rank's."""
    if not opened.manifest.values["rng"]:
        return
    sizes = opened.manifest.layout
    by_rank: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}
    for name in opened.dense.tensors:
        if name.startswith(RNG):
            _, pp, tp, dp, rest = name.split(".", 4)
            by_rank.setdefault((int(pp[2:]), int(tp[2:]), int(dp[2:])), {})[rest] = opened.dense.read(name)
    for (pipeline, tensor, data), states in by_rank.items():
        shape, place = [sizes["pipeline"], sizes["tensor"]], [pipeline, tensor]
        if sizes["expert"] > 1:
            shape, place = [*shape, sizes["data"]], [*place, data]
        elif data:
            continue
        name = f"rng_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, shape))}"
        yield name, [[rng_as_stock(states)]]


def _empty_objects(opened: Opened) -> Iterator[tuple[str, object]]:
    """What stock looks for of every linear layer, experts' included, although there is nothing in it."""
    markers = [name.removeprefix(OBJECT) for name in opened.dense.tensors if name.startswith(OBJECT)]
    for name in markers:
        yield name, [None]
    if not any(EXTRA in name for name in markers):
        return
    layers = _num_layers(opened)
    for path, module in opened.pages.modules.items():
        for linear in ("linear_fc1", "linear_fc2"):
            key, layer = key_of_experts(path, linear, stacked=bool(layers))
            for expert in range(module.num_experts):
                place = (
                    f"{layer}.{expert}_{layers}.{module.num_experts}" if layers else f"{expert}_{module.num_experts}"
                )
                yield f"{key}{EXTRA}{place}", [None]


def _num_layers(opened: Opened) -> int:
    """Of the model, where its tensors are stacked; else 0."""
    stacked = [name for name in opened.dense.tensors if name.startswith(MODEL) and is_stacked(name)]
    return opened.dense.tensors[stacked[0]][0].global_shape[0] if stacked else 0


def _common(opened: Opened, stock: StockOptimizer | None) -> dict[str, Any]:
    values = opened.manifest.values
    args = argparse.Namespace(**values["run"]["args"])
    args.consumed_train_samples, args.consumed_valid_samples = int(values["run"]["consumed_samples"]), 0
    args.skipped_train_samples = 0
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {"args": args, "checkpoint_version": _VERSION, "iteration": opened.manifest.step}
    if stock is not None:
        common |= {"optimizer": stock.as_stock(), "opt_param_scheduler": dict(values["schedule"])}
        if stock.form == "distributed":
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**common, "content_metadata": metadata}
