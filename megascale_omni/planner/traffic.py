"""How many bytes a step moves under a budget: the steps of a model, coarsely, replayed as a trace.

[Note: coarse steps]
A module's pages are taken together in a few pieces, an expert or several each. The visits of a step are made as a run
makes them: every micro-batch forward and backward through the layers, then one sweep over the gradients and one of the
optimizer. They are replayed for four steps under MIN, which a run comes close to; the last one counts. With few active
experts each forward draws them anew, from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import SLOT_ALIGNMENT
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.recorder import PHASES
from megascale_omni.paging.replay import replay
from megascale_omni.paging.trace import Op, Trace, TracedModel, TracedModule
from megascale_omni.planner.state import RankState
from megascale_omni.schedule import Phase

MOST_PIECES = 384
"""Pieces over all modules, more or less: a plan takes a second or two."""

MOST_MICRO_BATCHES = 5
"""More of them are a straight line on from the last two of these."""

STEPS = 4


@dataclass(frozen=True)
class Traffic:
    """Bytes a step moves in a steady run: to the device and back."""

    loaded_bytes: float
    written_bytes: float


def step_traffic(
    state: RankState, *, budget_bytes: int, micro_batches: int, active_share: float, recompute: bool, seed: int = 0
) -> Traffic:
    """The least that can be moved. ``active_share`` of a module's experts get tokens in each forward."""
    if budget_bytes >= state.total_bytes:
        return Traffic(0.0, 0.0)
    if micro_batches > MOST_MICRO_BATCHES:
        few, more = (
            step_traffic(
                state,
                budget_bytes=budget_bytes,
                micro_batches=MOST_MICRO_BATCHES - 1 + number,
                active_share=active_share,
                recompute=recompute,
                seed=seed,
            )
            for number in range(2)
        )
        beyond = micro_batches - MOST_MICRO_BATCHES
        return Traffic(
            more.loaded_bytes + beyond * max(0.0, more.loaded_bytes - few.loaded_bytes),
            more.written_bytes + beyond * max(0.0, more.written_bytes - few.written_bytes),
        )
    first = state.modules[0]
    experts = first.entry.num_experts
    pieces = max(1, min(experts * first.entry.num_slices, MOST_PIECES // len(state.modules)))
    # A piece is a slot whose bytes stand for the pages in it; only proportions matter.
    unit = {p: first.slot_class(p).nbytes * first.entry.num_pages / pieces for p in first.dtypes}
    least = min(unit.values())
    numel = {p: max(1, round(64 * u / least)) * SLOT_ALIGNMENT // 4 for p, u in unit.items()}
    model = _model(state, pieces, numel)
    scale = unit[Plane.WEIGHT] / (numel[Plane.WEIGHT] * 4)
    budget = Budget(fraction=min(1.0, max(budget_bytes / state.total_bytes, _floor(model))))
    active = max(1, round(pieces * active_share))
    maker = _Steps(model, pieces=pieces, active=active, micro_batches=micro_batches, recompute=recompute, seed=seed)
    before = replay(maker.trace(STEPS - 1), policy="min", budget=budget)
    after = replay(maker.trace(STEPS), policy="min", budget=budget)
    return Traffic(
        (after.bytes_in - before.bytes_in) * scale, max(0.0, (after.written_bytes - before.written_bytes) * scale)
    )


def _model(state: RankState, pieces: int, numel: dict[Plane, int]) -> TracedModel:
    planes = {p.name.lower(): n for p, n in numel.items()}
    slot_bytes = {name: n * 4 for name, n in planes.items()}
    kinds = {name: f"float32 x {n}" for name, n in planes.items()}
    floors = dict.fromkeys(planes, 2 * len(planes))
    return TracedModel(
        tuple(TracedModule(f"m{n}", pieces, 1, slot_bytes, kinds, floors) for n in range(len(state.modules)))
    )


def _floor(model: TracedModel) -> float:
    from megascale_omni.paging.budget import smallest_budget
    from megascale_omni.paging.replay import needs_of

    return min(1.0, 1.01 * smallest_budget(needs_of(model)) / model.total_bytes)


class _Steps:
    """Makes the events of steps."""

    def __init__(
        self, model: TracedModel, *, pieces: int, active: int, micro_batches: int, recompute: bool, seed: int
    ) -> None:
        self.model, self.pieces, self.active = model, pieces, active
        self.micro_batches, self.recompute, self.seed = micro_batches, recompute, seed
        self.planes = tuple(Plane[name.upper()] for name in model.modules[0].slot_bytes)
        self.numbers: list[int] = []

    def trace(self, steps: int) -> Trace:
        """The trace of some steps, after every page but gradients was made."""
        self.numbers = []
        generator = random.Random(self.seed)
        for module in range(len(self.model.modules)):
            for plane in self.planes:
                if plane is not Plane.GRADIENT:
                    for piece in range(self.pieces):
                        self._event(Op.CREATE, [self._id(module, piece, plane)])
        present: set[tuple[int, int]] = set()
        for number in range(steps):
            self._event(Op.STEP, [number + 1])
            if present:
                self._event(Op.DROP, [self._id(m, p, Plane.GRADIENT) for m, p in sorted(present)])
            present = self._step(generator)
        return Trace(self.model, np.asarray(self.numbers, dtype=np.int32), whole=True)

    def _step(self, generator: random.Random) -> set[tuple[int, int]]:
        present: set[tuple[int, int]] = set()
        modules = range(len(self.model.modules))
        for _ in range(self.micro_batches):
            drawn = {m: sorted(generator.sample(range(self.pieces), self.active)) for m in modules}
            for module in modules:
                self._visit(Phase.FORWARD, module, drawn[module], (Plane.WEIGHT,))
            for module in reversed(modules):
                if self.recompute:
                    self._visit(Phase.RECOMPUTE, module, drawn[module], (Plane.WEIGHT,))
                new = {(module, piece) for piece in drawn[module]} - present
                present |= new
                self._visit(Phase.BACKWARD, module, drawn[module], (Plane.WEIGHT, Plane.GRADIENT), new=new)
        for planes in ((Plane.GRADIENT,), self.planes):
            for module in modules:
                self._visit(Phase.STEP, module, [p for p in range(self.pieces) if (module, p) in present], planes)
        return present

    def _visit(
        self,
        phase: Phase,
        module: int,
        pieces: list[int],
        planes: tuple[Plane, ...],
        new: set[tuple[int, int]] | None = None,
    ) -> None:
        bits = sum(1 << int(plane) for plane in planes)
        self._event(Op.VISIT, [PHASES.index(phase), module, bits, *pieces])
        for piece in pieces:
            ids = [self._id(module, piece, plane) for plane in planes]
            if new and (module, piece) in new:
                self._event(Op.CREATE, [self._id(module, piece, Plane.GRADIENT)])
            self._event(Op.HOLD, ids)
            self._event(Op.REACH, [piece])
            written = [
                i for i, plane in zip(ids, planes, strict=True) if phase is Phase.STEP or plane is Plane.GRADIENT
            ]
            if written and not (phase is Phase.STEP and planes == (Plane.GRADIENT,)):
                self._event(Op.WRITE, written)
            self._event(Op.RELEASE, ids)

    def _id(self, module: int, piece: int, plane: Plane) -> int:
        return (module * self.pieces + piece) * len(Plane) + int(plane)

    def _event(self, op: Op, numbers: list[int]) -> None:
        self.numbers += [int(op), len(numbers), *numbers]
