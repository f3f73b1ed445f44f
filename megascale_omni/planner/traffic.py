"""How many bytes a step moves under a budget: the steps of a model, coarsely, replayed as a trace.

[Note: coarse steps]
A module's pages are taken together in a few pieces, an expert or several each. The visits of a step are made as a run
makes them: every micro-batch forward and backward through the layers, then one sweep over the gradients where there is
one, and one of the optimizer, or its work in the last backward. They are replayed for four steps under MIN, which a run
comes close to; the last one counts. With few active experts each forward draws them anew, from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import SLOT_ALIGNMENT
from megascale_omni.paging.planes import NUM_PLANES, Plane
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
class Moves:
    """Bytes that come to the device, and bytes that are written back."""

    loaded_bytes: float = 0.0
    written_bytes: float = 0.0

    def __add__(self, other: Moves) -> Moves:
        return Moves(self.loaded_bytes + other.loaded_bytes, self.written_bytes + other.written_bytes)

    def beyond(self, other: Moves, times: float) -> Moves:
        """On a straight line through ``other`` and this, ``times`` of their distance beyond this."""
        return Moves(
            self.loaded_bytes + times * max(0.0, self.loaded_bytes - other.loaded_bytes),
            self.written_bytes + times * max(0.0, self.written_bytes - other.written_bytes),
        )


@dataclass(frozen=True)
class Traffic:
    """What a step moves in a steady run: in its forward and backward passes, and in its optimizer."""

    passes: Moves = Moves()
    step: Moves = Moves()

    @property
    def all(self) -> Moves:
        """Of both."""
        return self.passes + self.step


@dataclass(frozen=True)
class Work:
    """What a step does. ``active_share`` of a module's experts get tokens in each forward."""

    micro_batches: int
    active_share: float
    recompute: bool = False
    gradient_sweep: bool = True
    """Whether gradients are looked at in a sweep of their own before the optimizer."""
    step_in_backward: bool = False
    """Whether pages are stepped in the last backward."""


def step_traffic(state: RankState, work: Work, *, budget_bytes: int, seed: int = 0) -> Traffic:
    """The least that can be moved."""
    if budget_bytes >= state.total_bytes:
        return Traffic()
    if work.micro_batches > MOST_MICRO_BATCHES:
        few, more = (
            step_traffic(state, replace(work, micro_batches=count), budget_bytes=budget_bytes, seed=seed)
            for count in (MOST_MICRO_BATCHES - 1, MOST_MICRO_BATCHES)
        )
        times = work.micro_batches - MOST_MICRO_BATCHES
        return Traffic(more.passes.beyond(few.passes, times), more.step.beyond(few.step, times))
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
    maker = _Steps(model, work, pieces=pieces, seed=seed)
    before = replay(maker.trace(STEPS - 1), policy="min", budget=budget)
    after = replay(maker.trace(STEPS), policy="min", budget=budget)

    def moves(phases: Iterable[Phase]) -> Moves:
        found = [0, 0]
        for phase in phases:
            for column in range(2):
                found[column] += after.phases.get(phase.value, [0, 0])[column]
                found[column] -= before.phases.get(phase.value, [0, 0])[column]
        return Moves(max(0, found[0]) * scale, max(0, found[1]) * scale)

    return Traffic(moves(phase for phase in Phase if phase is not Phase.STEP), moves((Phase.STEP,)))


def traced_traffic(trace: Trace, state: RankState, *, budget_bytes: int) -> Traffic:
    """What a step of a recorded run would have moved at least under a budget, on average over its steps.

    Raises:
        ValueError: the trace is of another model, page size or layout; it has no whole step.
    """
    has = [(m.experts, m.slices, sum(m.slot_bytes.values())) for m in trace.model.modules]
    needs = [
        (m.entry.num_experts, m.entry.num_slices, sum(m.slot_class(p).nbytes for p in m.dtypes)) for m in state.modules
    ]
    if has != needs:
        raise ValueError(
            f"the trace is of another model: {_described(has)}, and the plan has {_described(needs)}; give the model, "
            "the page size and the layout that it was recorded with"
        )
    steps = sum(event.op is Op.STEP for event in trace)
    if not steps:
        raise ValueError("the trace has no training step: record a longer run")
    if budget_bytes >= state.total_bytes:
        return Traffic()
    moved = replay(trace, policy="min", budget=Budget(nbytes=budget_bytes))

    def moves(phases: Iterable[Phase]) -> Moves:
        columns = np.sum([moved.phases.get(phase.value, [0, 0]) for phase in phases], axis=0)
        return Moves(float(columns[0]) / steps, float(columns[1]) / steps)

    passes = (phase for phase in Phase if phase not in (Phase.STEP, Phase.EVAL))
    return Traffic(moves(passes), moves((Phase.STEP,)))


def _described(modules: list[tuple[int, int, int]]) -> str:
    experts, slices, nbytes = modules[0]
    more = "" if len(set(modules)) == 1 else ", others differ"
    return f"{len(modules)} modules of {experts} experts of {slices} pages of {nbytes} bytes in all planes{more}"


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
    from megascale_omni.paging.traced_slots import needs_of

    return min(1.0, 1.01 * smallest_budget(needs_of(model)) / model.total_bytes)


class _Steps:
    """Makes the events of steps."""

    def __init__(self, model: TracedModel, work: Work, *, pieces: int, seed: int) -> None:
        self.model, self.work, self.pieces, self.seed = model, work, pieces, seed
        self.active = max(1, round(pieces * work.active_share))
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
        for number in range(steps):
            self._event(Op.STEP, [number + 1])
            self._step(generator)
        return Trace(self.model, np.asarray(self.numbers, dtype=np.int32), whole=True)

    def _step(self, generator: random.Random) -> None:
        present: set[tuple[int, int]] = set()
        modules, work = range(len(self.model.modules)), self.work
        for number in range(work.micro_batches):
            drawn = {m: sorted(generator.sample(range(self.pieces), self.active)) for m in modules}
            for module in modules:
                self._visit(Phase.FORWARD, module, drawn[module], (Plane.WEIGHT,))
            steps = work.step_in_backward and number == work.micro_batches - 1
            for module in reversed(modules):
                if work.recompute:
                    self._visit(Phase.RECOMPUTE, module, drawn[module], (Plane.WEIGHT,))
                new = {(module, piece) for piece in drawn[module]} - present
                present |= new
                planes = self.planes if steps else (Plane.WEIGHT, Plane.GRADIENT)
                self._visit(Phase.BACKWARD, module, drawn[module], planes, new=new)
                if steps:
                    rest = [p for p in range(self.pieces) if (module, p) in present and p not in set(drawn[module])]
                    self._visit(Phase.BACKWARD, module, rest, planes)
        sweeps = () if work.step_in_backward else (self.planes,)
        for planes in ((Plane.GRADIENT,), *sweeps) if work.gradient_sweep else sweeps:
            for module in modules:
                self._visit(Phase.STEP, module, [p for p in range(self.pieces) if (module, p) in present], planes)

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
            steps = planes == self.planes
            written = [i for i, plane in zip(ids, planes, strict=True) if steps or plane is Plane.GRADIENT]
            if written and not (phase is Phase.STEP and not steps):
                self._event(Op.WRITE, written)
            self._event(Op.RELEASE, ids)
            if steps:  # it has been used
                self._event(Op.DROP, [self._id(module, piece, Plane.GRADIENT)])

    def _id(self, module: int, piece: int, plane: Plane) -> int:
        return (module * self.pieces + piece) * NUM_PLANES + int(plane)

    def _event(self, op: Op, numbers: list[int]) -> None:
        self.numbers += [int(op), len(numbers), *numbers]
