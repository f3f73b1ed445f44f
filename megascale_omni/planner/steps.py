"""The steps of a model as a trace, made as a run makes them.

[Note: steps of a plan]
Every micro-batch goes forward and backward through the layers, in waves of a batch of pages; then come a sweep over
gradients that the last backward did not complete, where there are some, and one of the optimizer, page by page, or its
work in the last backward. Which experts are active is known from routers that were measured; otherwise each forward
draws them anew, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megascale_omni.paging.batches import batch_pages
from megascale_omni.paging.layout import SLOT_ALIGNMENT
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.recorder import PHASES
from megascale_omni.paging.trace import Op, Trace, TracedModel, TracedModule
from megascale_omni.planner.state import RankState
from megascale_omni.schedule import Phase

MOST_PIECES = 384
"""Pages, or pieces, over all modules, more or less: a plan takes a second or two."""


@dataclass(frozen=True)
class Work:
    """What a step does. ``active_share`` of a module's experts get tokens in each forward.

    ``routed``: which ones, for each forward and layer, over and over again, and for layers in proportion where there
    are others than a model has. None: they are drawn.
    """

    micro_batches: int
    active_share: float
    recompute: bool = False
    gradient_sweep: bool = True
    """Whether gradients are looked at in a sweep of their own before the optimizer."""
    step_in_backward: bool = False
    """Whether pages are stepped in the last backward."""
    routed: tuple[tuple[tuple[int, ...], ...], ...] | None = None


def has_few_pages(state: RankState) -> bool:
    """Whether the pages themselves are few enough to be replayed, in modules that are alike."""
    alike = len({(m.entry.num_experts, m.entry.num_slices) for m in state.modules}) == 1
    return alike and sum(module.entry.num_pages for module in state.modules) <= MOST_PIECES


def wave_pages(state: RankState) -> int:
    """Pages of a wave."""
    first = state.modules[0]
    return batch_pages(first.layout, first.dtypes[Plane.WEIGHT])


def coarse_model(state: RankState) -> tuple[TracedModel, float]:
    """Modules of a few pieces, and bytes of the model for each of theirs."""
    first = state.modules[0]
    pieces = max(1, min(first.entry.num_pages, MOST_PIECES // len(state.modules)))
    # A piece is a slot whose bytes stand for the pages in it; only proportions matter.
    unit = {p: first.slot_class(p).nbytes * first.entry.num_pages / pieces for p in first.dtypes}
    least = min(unit.values())
    numel = {p: max(1, round(64 * u / least)) * SLOT_ALIGNMENT // 4 for p, u in unit.items()}
    planes = {p.name.lower(): n for p, n in numel.items()}
    slot_bytes = {name: n * 4 for name, n in planes.items()}
    kinds = {name: f"float32 x {n}" for name, n in planes.items()}
    floors = dict.fromkeys(planes, 2 * len(planes))
    modules = (TracedModule(f"m{n}", pieces, 1, slot_bytes, kinds, floors) for n in range(len(state.modules)))
    return TracedModel(tuple(modules)), unit[Plane.WEIGHT] / slot_bytes["weight"]


class Steps:
    """Makes the events of steps, see [Note: steps of a plan]. ``batch``: pages of a wave."""

    def __init__(self, model: TracedModel, work: Work, *, batch: int, seed: int) -> None:
        self._model, self._work, self._batch, self._seed = model, work, batch, seed
        first = model.modules[0]
        self._experts, self._slices = first.experts, first.slices
        self._active = max(1, round(first.experts * work.active_share))
        self._planes = tuple(Plane[name.upper()] for name in first.slot_bytes)
        self._numbers: list[int] = []
        self._forwards = 0
        self._made: set[int] = set()  # moments that there are

    def trace(self, steps: int) -> Trace:
        """The trace of some steps, after weights and their masters were made; moments come with the first step."""
        self._numbers = []
        self._made.clear()
        generator = random.Random(self._seed)
        self._forwards = 0
        for module in range(len(self._model.modules)):
            for plane in self._planes:
                if plane in (Plane.WEIGHT, Plane.MASTER):
                    for page in range(self._experts * self._slices):
                        self._event(Op.CREATE, [self._id(module, page, plane)])
        for number in range(steps):
            self._event(Op.STEP, [number + 1])
            self._step(generator)
        return Trace(self._model, np.asarray(self._numbers, dtype=np.int32), whole=True)

    def _step(self, generator: random.Random) -> None:
        modules, work = range(len(self._model.modules)), self._work
        present: list[set[int]] = [set() for _ in modules]  # pages with a gradient
        complete: list[set[int]] = [set() for _ in modules]
        for number in range(work.micro_batches):
            drawn = [self._draw(generator, module) for module in modules]
            self._forwards += 1
            for module in modules:
                self._waves(Phase.FORWARD, module, drawn[module])
            for module in reversed(modules):
                if work.recompute:
                    self._waves(Phase.RECOMPUTE, module, drawn[module])
                steps = work.step_in_backward and number == work.micro_batches - 1
                self._backward(module, drawn[module], present[module], steps=steps)
            if number == work.micro_batches - 1 and not work.gradient_sweep:
                complete = [set(pages) for pages in drawn]
        for module in modules:
            self._sweep(module, sorted(present[module] - complete[module]), (Plane.GRADIENT,))
        for module in modules:
            self._sweep(module, sorted(present[module]), self._planes)

    def _draw(self, generator: random.Random, module: int) -> list[int]:
        """Pages of the experts that a forward needs."""
        if self._work.routed is None:
            experts = sorted(generator.sample(range(self._experts), self._active))
        else:
            layers = self._work.routed[self._forwards % len(self._work.routed)]
            experts = sorted(layers[module * len(layers) // len(self._model.modules)])
        return [expert * self._slices + number for expert in experts for number in range(self._slices)]

    def _waves(self, phase: Phase, module: int, pages: list[int]) -> None:
        self._visit(phase, module, (Plane.WEIGHT,), pages)
        for wave in self._cut(pages):
            ids = self._ids(module, wave, Plane.WEIGHT)
            self._event(Op.HOLD, ids)
            self._event(Op.REACH, [wave[-1]])
            self._event(Op.RELEASE, ids)

    def _backward(self, module: int, pages: list[int], present: set[int], *, steps: bool) -> None:
        others = [p for p in self._planes if p not in (Plane.WEIGHT, Plane.GRADIENT)] if steps else []
        self._visit(Phase.BACKWARD, module, (Plane.WEIGHT, Plane.GRADIENT, *others), pages)
        for wave in self._cut(pages):
            weights, gradients = self._ids(module, wave, Plane.WEIGHT), self._ids(module, wave, Plane.GRADIENT)
            self._event(Op.HOLD, weights)
            for page in wave:
                if page not in present:
                    self._event(Op.CREATE, [self._id(module, page, Plane.GRADIENT)])
            present.update(wave)
            self._event(Op.HOLD, gradients)
            self._event(Op.REACH, [wave[-1]])
            self._event(Op.WRITE, gradients)
            if steps:
                self._event(Op.WRITE, weights)
            for page in wave if steps else ():
                ids = [self._id(module, page, plane) for plane in others]
                for page_id, plane in zip(ids, others, strict=True):
                    self._make(page_id, plane)
                    self._event(Op.HOLD, [page_id])
                    self._event(Op.WRITE, [page_id])
                self._event(Op.RELEASE, ids)
            self._event(Op.RELEASE, gradients)
            if steps:
                self._event(Op.DROP, gradients)
                present.difference_update(wave)
            self._event(Op.RELEASE, weights)

    def _sweep(self, module: int, pages: list[int], planes: tuple[Plane, ...]) -> None:
        """Page by page; the optimizer's drops a page's gradient when it has stepped the page."""
        if not pages:
            return
        self._visit(Phase.STEP, module, planes, pages)
        for page in pages:
            ids = [self._id(module, page, plane) for plane in planes]
            for page_id, plane in zip(ids, planes, strict=True):
                self._make(page_id, plane)
            self._event(Op.HOLD, ids)
            if Plane.WEIGHT in planes:
                self._event(Op.WRITE, ids)
            self._event(Op.REACH, [page])
            self._event(Op.RELEASE, ids)
            if Plane.WEIGHT in planes:
                self._event(Op.DROP, [self._id(module, page, Plane.GRADIENT)])

    def _make(self, page_id: int, plane: Plane) -> None:
        """Moments are made when they are first needed."""
        if plane in (Plane.MOMENT1, Plane.MOMENT2) and page_id not in self._made:
            self._made.add(page_id)
            self._event(Op.CREATE, [page_id])

    def _cut(self, pages: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(pages), self._batch):
            yield pages[start : start + self._batch]

    def _visit(self, phase: Phase, module: int, planes: Sequence[Plane], pages: list[int]) -> None:
        bits = sum(1 << int(plane) for plane in planes)
        self._event(Op.VISIT, [PHASES.index(phase), module, bits, *pages])

    def _ids(self, module: int, pages: list[int], plane: Plane) -> list[int]:
        return [self._id(module, page, plane) for page in pages]

    def _id(self, module: int, page: int, plane: Plane) -> int:
        return (module * self._experts * self._slices + page) * NUM_PLANES + int(plane)

    def _event(self, op: Op, numbers: list[int]) -> None:
        self._numbers += [int(op), len(numbers), *numbers]
