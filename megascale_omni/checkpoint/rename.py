"""A Megatron run's checkpoint for a DeepSpeed run of the same model, and the other way: other names, same numbers.

Weights, masters, moments, the number of steps, the place in the data, what clipping by module has measured, and heat go
over. Parameter groups, learning-rate schedules and their settings are those of the framework that goes on: a DeepSpeed
run steps its own schedule to the place, a Megatron run's are in the checkpoint that it is made like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megascale_omni.checkpoint.assemble import Assembly, ModuleSource, PageSource, Source, write
from megascale_omni.checkpoint.datafile import NAMES
from megascale_omni.checkpoint.hf_view import KINDS, HfView, hf_view, is_megatrons
from megascale_omni.checkpoint.megatron_keys import MODEL, OBJECT, OPTIMIZER, RNG, is_stacked, numbered
from megascale_omni.checkpoint.model_names import Attention, ModelNames, Rule, fuse, path_in_hf
from megascale_omni.checkpoint.opening import Opened
from megascale_omni.checkpoint.pages import STATE_PLANES, PageAt, StoredPage
from megascale_omni.checkpoint.pages_load import Group, planes_of
from megascale_omni.paging.planes import Plane

_RNG = re.compile(rf"{re.escape(RNG)}pp0\.tp0\.dp(\d+)\.(?!tracker\.)(.*)")


def to_hf_names(opened: Opened, root: Path, tag: str | None = None) -> Path:
    """Writes ``root/tag`` (default ``global_stepN``), which ``load_elastic`` loads, from a Megatron run's checkpoint.

    Raises:
        ValueError: not one of a Megatron run, or tensors that have no place in a Hugging Face model.
    """
    if not is_megatrons(opened):
        raise ValueError(f"checkpoint {opened.folder} has Hugging Face's names already")
    view, values = hf_view(opened), opened.manifest.values
    assembly = Assembly(
        step=opened.manifest.step,
        dense={**view.dense, **dict(_rng_of_ranks(opened))},
        values={
            "client": {},
            "position": {
                "global_steps": opened.manifest.step,
                "global_samples": int(values["run"].get("consumed_samples", 0)),
                "skipped_steps": 0,
            },
            "schedule": None,
            "steps": view.steps,
            "groups": None,
            "clipping": values.get("clipping"),
        },
        versions={"made-from-megatron-core": opened.manifest.versions["megatron-core"]},
    )
    _add_modules(assembly, view, styles=dict.fromkeys(view.modules, "hf"), groups=[{}])
    return write(root, tag or f"global_step{opened.manifest.step}", assembly)


def _rng_of_ranks(opened: Opened) -> Iterator[tuple[str, Source]]:
    """Random numbers of each data-parallel rank; trackers are Megatron's own."""
    for name, parts in opened.dense.tensors.items():
        match = _RNG.fullmatch(name)
        if match is not None:
            dtype, shape = NAMES[parts[0].place.dtype], parts[0].global_shape
            yield f"{RNG}{match[1]}.{match[2]}", Source(dtype, shape, partial(opened.dense.read, name))


def _add_modules(
    assembly: Assembly,
    view: HfView,
    *,
    styles: Mapping[str, str],
    groups: Sequence[Mapping[str, Any]],
    named: Callable[[str], str] = str,
    bound: Mapping[str, tuple[int, int | None] | None] | None = None,
) -> None:
    """Adds all experts, every step caught up, under the paths ``named`` of the view's."""
    index, pages = view.opened.pages, _CaughtUp(view.opened)
    for path, stored in view.modules.items():
        module = index.modules[stored]
        of_module = (0, 0 if module.shape.bias else None) if module.histories != (None, None) else None
        if bound is not None:
            of_module = bound[path]
        to = named(path)
        heat = index.heat.get(stored, ())
        assembly.modules[to] = ModuleSource(module.shape, module.num_experts, styles[path], of_module, heat)
        for expert in range(module.num_experts):
            for page in index.pages[stored, expert]:
                assembly.pages.append(pages.source(page, (to, expert, page.at[2])))
    if index.num_steps is not None:
        assembly.optimizer = index.num_steps, index.arithmetic, groups


class _CaughtUp:
    """Pages of a checkpoint with all their steps made; the last one stays, as its planes are asked for in turn."""

    def __init__(self, opened: Opened) -> None:
        self._index = opened.pages
        self._last: tuple[PageAt, dict[Plane, torch.Tensor]] | None = None

    def source(self, page: StoredPage, at: PageAt) -> PageSource:
        """A stored page, to be written at another place."""
        weight = page.planes["weight"]
        dtype = NAMES[weight.dtype]
        numel = (weight.end - weight.begin) // dtype.itemsize
        labels = set(page.planes)
        stepped = self._index.modules[page.at[0]].histories != (None, None)
        if dtype is not torch.float32 and stepped:
            labels.add("master")  # a step that is made up for makes it
        sources = {}
        for plane in STATE_PLANES:
            if plane.name.lower() in labels:
                kind = dtype if plane is Plane.WEIGHT else torch.float32
                sources[plane.name.lower()] = Source(kind, (numel,), partial(self._read, page, plane))
        return PageSource(at, page.stop, sources)

    def _read(self, page: StoredPage, plane: Plane) -> torch.Tensor:
        if self._last is None or self._last[0] != page.at:
            neurons = slice(page.at[2], page.stop)
            self._last = page.at, planes_of(self._index, page.at[:2], neurons, catch_up=True)
        found = self._last[1].get(plane)
        return self._last[1][Plane.WEIGHT].float() if found is None else found


# -- the other way ----------------------------------------------------------------------------------------------------


def to_megatron_names(opened: Opened, root: Path, tag: str | None = None, *, like: Opened) -> Path:
    """Writes ``root/tag`` (default ``iter_N``), which a Megatron run loads, from one with Hugging Face's names.

    ``like`` is a checkpoint of the Megatron run that is to go on, saved at any step: it says how tensors are called and
    stacked there, and has the arguments, parameter groups and schedule. Random numbers begin anew.

    Raises:
        ValueError: tensors that the two do not have in common, or of different shapes.
    """
    if is_megatrons(opened) or not is_megatrons(like):
        which = opened if is_megatrons(opened) else like
        verb = "has Megatron's names already" if which is opened else "is not one of a Megatron run: give one as --like"
        raise ValueError(f"checkpoint {which.folder} {verb}")
    view, values = hf_view(opened), dict(like.manifest.values)
    with_optimizer = opened.pages.num_steps is not None and any(name.startswith(OPTIMIZER) for name in view.dense)
    if with_optimizer and values.get("stock") is None:
        raise ValueError(f"checkpoint {like.folder} was saved without an optimizer, which is needed here")
    step, samples = opened.manifest.step, int(opened.manifest.values.get("position", {}).get("global_samples", 0))
    schedule = values.get("schedule")
    values |= {
        "run": {**values["run"], "consumed_samples": samples},
        "schedule": None if schedule is None else {**schedule, "num_steps": samples},
        "optimizer": with_optimizer,
        "rng": False,
        "stock": {**values["stock"], "steps": view.steps} if with_optimizer else None,
        "clipping": opened.manifest.values.get("clipping"),
        "paging_step": step,
    }
    assembly = Assembly(
        step=step,
        dense=dict(_dense_like(view, like, with_optimizer=with_optimizer)),
        values=values,
        layout=like.manifest.layout,
        versions={"megatron-core": like.manifest.versions["megatron-core"]},
    )
    _add_modules_like(assembly, view, like)
    return write(root, tag or f"iter_{step:07d}", assembly)


def _dense_like(view: HfView, like: Opened, *, with_optimizer: bool) -> Iterator[tuple[str, Source]]:
    attention = Attention.of_args(like.manifest.values["run"]["args"])
    names = ModelNames(gated_shared=any("shared_experts.gate_weight" in name for name in like.dense.tensors))
    left = {name for name in view.dense if name.startswith(MODEL)}
    for name, parts in like.dense.tensors.items():
        if name.startswith(OBJECT):
            empty = torch.empty(parts[0].global_shape, dtype=NAMES[parts[0].place.dtype])
            yield name, Source(empty.dtype, tuple(empty.shape), partial(_same, empty))
        if not name.startswith(MODEL):
            continue
        key, shape = name.removeprefix(MODEL), parts[0].global_shape
        keys = [numbered(key, layer) for layer in range(shape[0])] if is_stacked(key) else [key]
        found = [names.find(one) for one in keys]
        rules = [pair for pair in found if pair is not None]
        wanted = [part for _, theirs in rules for part in theirs]
        missing = [part for part in wanted if MODEL + part not in view.dense]
        if len(rules) < len(found) or missing:
            what = f"{missing[0]}, which {name} is made of" if missing else f"anything that {name} could be made of"
            raise ValueError(f"checkpoint {view.opened.folder} does not have {what} in {like.folder}")
        left -= {MODEL + part for part in wanted}
        for kind in KINDS if with_optimizer else KINDS[:1]:
            if all(kind + part in view.dense for part in wanted):
                yield kind + key, _fused(view, kind, rules, attention, stacked=is_stacked(key), wanted=shape)
        if with_optimizer and KINDS[-1] + wanted[0] in view.dense:
            steps = torch.full(shape[:1] if is_stacked(key) else (1,), float(view.steps))
            yield f"{OPTIMIZER}step.{key}", Source(steps.dtype, tuple(steps.shape), partial(_same, steps))
    if left:
        raise ValueError(f"checkpoint {view.opened.folder} has {sorted(left)[0]}, which has no place in {like.folder}")


def _fused(
    view: HfView,
    kind: str,
    rules: Sequence[tuple[Rule, Sequence[str]]],
    attention: Attention,
    *,
    stacked: bool,
    wanted: tuple[int, ...],
) -> Source:
    def put_together(read: Callable[[Source], torch.Tensor]) -> torch.Tensor:
        layers = [fuse(rule, [read(view.dense[kind + part]) for part in theirs], attention) for rule, theirs in rules]
        return torch.stack(layers) if stacked else layers[0]

    shape = tuple(put_together(lambda source: torch.empty(source.shape, device="meta")).shape)
    first = view.dense[kind + rules[0][1][0]]
    if shape != wanted:
        raise ValueError(f"{rules[0][1][0]} and its like would make {rules[0][0].megatron[0]} {shape}, not {wanted}")
    return Source(first.dtype, shape, lambda: put_together(lambda source: source.read()))


def _add_modules_like(assembly: Assembly, view: HfView, like: Opened) -> None:
    settings: list[Group] = []
    bound: dict[str, tuple[int, int | None] | None] = {}
    ours = {path_in_hf(path): path for path in like.pages.modules}
    if ours.keys() != view.modules.keys():
        different = sorted(ours.keys() ^ view.modules.keys())
        raise ValueError(f"{view.opened.folder} and {like.folder} have experts in different places: {different[0]}")

    def number(group: Group | None) -> int | None:
        if group is None:
            return None
        if group not in settings:
            settings.append(group)
        return settings.index(group)

    for path, theirs in ours.items():
        module, wanted = view.opened.pages.modules[view.modules[path]], like.pages.modules[theirs]
        if (module.shape, module.num_experts) != (wanted.shape, wanted.num_experts):
            raise ValueError(
                f"{view.opened.folder} has {module.num_experts} experts of {module.shape} at {path}, {like.folder} "
                f"{wanted.num_experts} of {wanted.shape}"
            )
        weights, biases = map(number, wanted.histories)
        bound[path] = None if weights is None else (weights, biases)
    styles = {path: like.pages.modules[theirs].style for path, theirs in ours.items()}
    _add_modules(assembly, view, styles=styles, groups=[], named=ours.__getitem__, bound=bound)
    if assembly.optimizer is not None:
        assembly.optimizer = (*assembly.optimizer[:2], [group.settings for group in settings])


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
