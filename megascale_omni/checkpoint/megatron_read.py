"""Checkpoints in Megatron's own format into ours, whatever model they are of: none is built, all is read in parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.assemble import Assembly, ModuleSource, PageSource, Source, write
from megascale_omni.checkpoint.boxes import Box
from megascale_omni.checkpoint.megatron_keys import (
    MASTER,
    MODEL,
    MOMENTS,
    OBJECT,
    OPTIMIZER,
    RNG,
    STATE,
    TRACKER,
    ExpertsKey,
    StockOptimizer,
    experts_key,
    is_stacked,
    rng_of_stock,
)
from megascale_omni.checkpoint.torch_dist import TorchDist, load_plain
from megascale_omni.paging.layout import DEFAULT_PAGE_BYTES, ExpertShape, PageLayout
from megascale_omni.paging.names import NamedTensors

_SIZES = {
    "pipeline": "pipeline_model_parallel_size",
    "tensor": "tensor_model_parallel_size",
    "data": "data_parallel_size",
    "expert": "expert_model_parallel_size",
}
_LABELS = {"weight": "", "moment1": f"{STATE}{MOMENTS[0]}.", "moment2": f"{STATE}{MOMENTS[1]}."}
"""Planes, and what their tensors' keys begin with in Megatron's format."""


def from_torch_dist(source: Path, root: Path, *, tag: str | None = None, page_bytes: int = DEFAULT_PAGE_BYTES) -> Path:
    """Writes the checkpoint in ``source``, or the newest of a folder of them, as ``root/tag``.

    Raises:
        ValueError: damaged files, named; a layout of the optimizer that is not supported.
    """
    folder = _newest(source)
    data = folder / "common.pt"
    try:
        common = load_plain(data.read_bytes(), str(data))
    except OSError as error:
        raise ValueError(f"{data} cannot be read: {error.strerror or error}") from error
    stored = TorchDist(folder)
    args, step = common["args"], int(common["iteration"])
    stock = _optimizer_of(common, stored, folder)
    layout = {ours: int(getattr(args, theirs, 1)) for ours, theirs in _SIZES.items()}
    assembly = Assembly(
        step=step,
        layout=layout,
        versions={"megatron-core": str(getattr(args, "megatron_version", "unknown"))},
        values={
            "run": {"args": _plain_args(args), "consumed_samples": int(args.consumed_train_samples)},
            "schedule": common.get("opt_param_scheduler"),
            "optimizer": stock is not None,
            "rng": any(name.startswith("rng_state/") for name in stored.objects),
            "clipping": None if stock is None else stock.clipping,
            "stock": None if stock is None else _as_values(stock),
        },
    )
    _add_dense(assembly, stored, stock)
    _add_experts(assembly, stored, stock, page_bytes)
    _add_objects(assembly, stored)
    return write(root, tag or f"iter_{step:07d}", assembly)


def _newest(source: Path) -> Path:
    tracker = source / TRACKER
    if not tracker.is_file():
        return source
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"{tracker} holds {text!r} instead of an iteration")
    folder = source / f"iter_{int(text):07d}"
    if not folder.is_dir():
        raise ValueError(f"{tracker} names iteration {text}, and there is no {folder}")
    return folder


def _plain_args(args: argparse.Namespace) -> dict[str, Any]:
    def plain(value: object) -> bool:
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, bool | int | float | str)

    return {name: value for name, value in vars(args).items() if plain(value)}


def _optimizer_of(common: Mapping[str, Any], stored: TorchDist, folder: Path) -> StockOptimizer | None:
    if "optimizer" not in common:
        return None
    keys = [name for name in stored.tensors if name.startswith(("optimizer.", "chained_"))]
    if strange := [name for name in keys if not name.startswith(STATE)]:
        raise ValueError(
            f"{folder} has the optimizer's state in a layout that depends on ranks ({strange[0]}); save it with "
            "--dist-ckpt-optim-fully-reshardable, or load it with --megascale at its own layout"
        )
    form = "fp32"
    for name, key in MASTER.items():
        if any(tensor.startswith(f"{STATE}{key}.") for tensor in keys):
            form = name
    return StockOptimizer.of_stock(common["optimizer"], form)


def _as_values(stock: StockOptimizer) -> dict[str, Any]:
    return {
        "form": stock.form,
        "separate": stock.separate,
        "groups": [[dict(group) for group in groups] for groups in stock.groups],
        "steps": stock.steps,
    }


def _add_dense(assembly: Assembly, stored: TorchDist, stock: StockOptimizer | None) -> None:
    for name in stored.tensors:
        kind, _, key = name.removeprefix(STATE).partition(".") if name.startswith(STATE) else ("", "", name)
        if experts_key(key) is not None:
            continue
        if not kind:
            assembly.dense[MODEL + key] = stored.source(name)
        elif kind in MOMENTS:
            assembly.dense[f"{OPTIMIZER}{kind}.{key}"] = stored.source(name)
            if kind == MOMENTS[0] and stock is not None:
                shape = stored.shape(name)[:1] if is_stacked(key) else (1,)
                read = partial(torch.full, shape, float(stock.steps), dtype=torch.float32)
                assembly.dense[f"{OPTIMIZER}step.{key}"] = Source(torch.float32, shape, read)
        elif stored.dtype(key) is not torch.float32:
            assembly.dense[f"{OPTIMIZER}param.{key}"] = stored.source(name)


def _add_experts(assembly: Assembly, stored: TorchDist, stock: StockOptimizer | None, page_bytes: int) -> None:
    of_module: dict[tuple[str, str, int | None], dict[str, ExpertsKey]] = {}
    for name in stored.tensors:
        found = experts_key(name)
        if found is not None and not name.startswith(STATE):
            of_module.setdefault((found.before, found.rest, found.layer), {})[found.name] = found
    groups: list[Mapping[str, Any]] = []
    for keys in of_module.values():
        first = next(iter(keys.values()))
        shape = _shape_of(stored, keys)
        trained = f"{STATE}exp_avg.{first.key}" in stored.tensors
        if trained and stock is not None and not groups:
            groups = stock.experts_groups(bias=shape.bias)
        lead = stored.shape(first.key)[: 2 if first.stacked else 1]
        for layer in range(lead[0]) if first.stacked else [0]:
            path = first.path(layer)
            bound = (0, 1 if shape.bias else None) if trained else None
            assembly.modules[path] = ModuleSource(shape, lead[-1], "sequential", bound)
            _add_pages(assembly, stored, stock, keys, path=path, layer=layer, trained=trained, page_bytes=page_bytes)
    if stock is not None:
        assembly.optimizer = (stock.steps, "torch_adamw", groups)


def _shape_of(stored: TorchDist, keys: Mapping[str, ExpertsKey]) -> ExpertShape:
    down = stored.shape(keys["linear_fc2.weight"].key)
    wide = stored.shape(keys["linear_fc1.weight"].key)[-2]
    hidden, ffn = down[-2], down[-1]
    return ExpertShape(hidden=hidden, ffn=ffn, gated=wide == 2 * ffn, bias="linear_fc2.bias" in keys)


def _add_pages(
    assembly: Assembly,
    stored: TorchDist,
    stock: StockOptimizer | None,
    keys: Mapping[str, ExpertsKey],
    *,
    path: str,
    layer: int,
    trained: bool,
    page_bytes: int,
) -> None:
    module = assembly.modules[path]
    dtype = stored.dtype(keys["linear_fc1.weight"].key)
    layout = PageLayout.for_page_bytes(module.shape, page_bytes=page_bytes, dtype=dtype)
    labels = dict(_LABELS) if trained and stock is not None else {"weight": ""}
    if trained and stock is not None and dtype is not torch.float32:
        labels["master"] = f"{STATE}{MASTER[stock.form]}."
    expert_of = partial(_read_expert, stored, keys, layer)
    for expert in range(module.num_experts):
        for slice_ in range(layout.num_slices):
            neurons, numel = layout.neurons(slice_), layout.page_numel(slice_)
            planes = {
                label: Source(
                    dtype if label == "weight" else torch.float32,
                    (numel,),
                    partial(_page, expert_of, layout, prefix, expert, slice_),
                )
                for label, prefix in labels.items()
            }
            assembly.pages.append(PageSource((path, expert, neurons.start), neurons.stop, planes))


def _read_expert(
    stored: TorchDist, keys: Mapping[str, ExpertsKey], layer: int, prefix: str, expert: int
) -> dict[str, torch.Tensor]:
    """An expert's tensors in the sequential style."""
    found = {}
    for name, key in keys.items():
        shape = stored.shape(key.key)
        lead = (layer, expert) if key.stacked else (expert,)
        rest = shape[len(lead) :]
        box = Box((*lead, *(0,) * len(rest)), (*(1,) * len(lead), *rest))
        found[f"local_experts.0.{name}"] = stored.read(prefix + key.key, box).reshape(rest)
    return found


def _page(
    expert_of: Callable[[str, int], dict[str, torch.Tensor]],
    layout: PageLayout,
    prefix: str,
    expert: int,
    slice_: int,
) -> torch.Tensor:
    tensors = expert_of(prefix, expert)
    names = NamedTensors(layout=layout, num_experts=1, style="sequential")
    page = torch.empty(layout.page_numel(slice_), dtype=next(iter(tensors.values())).dtype)
    names.scatter(tensors, {(0, slice_): page})
    return page


def _add_objects(assembly: Assembly, stored: TorchDist) -> None:
    """Random numbers, and markers of what is stored empty. ValueError for objects with other contents."""
    for name in stored.objects:
        if not name.startswith("rng_state/shard_"):
            if any(_has_content(part) for part in stored.object(name)):
                raise ValueError(
                    f"{stored.folder} has {name}, which is not a tensor (Transformer Engine's state, for instance) and "
                    "cannot be converted"
                )
            if experts_key(name.partition("/")[0]) is None:
                empty = torch.empty(0)
                assembly.dense[OBJECT + name] = Source(empty.dtype, (0,), partial(_same, empty))
            continue
        place = [int(part) for part in name.removeprefix("rng_state/shard_").partition("_")[0].split(".")]
        pipeline, tensor, data = (*place, 0, 0)[:3] if len(place) < 3 else place
        states = rng_of_stock(stored.object(name)[0][0])
        for key, state in states.items():
            source = Source(state.dtype, tuple(state.shape), partial(_same, state))
            assembly.dense[f"{RNG}pp{pipeline}.tp{tensor}.dp{data}.{key}"] = source


def _has_content(part: object) -> bool:
    if isinstance(part, torch.Tensor):
        return bool(part.numel())
    return part is not None and getattr(part, "getbuffer", bytes)() != b""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
