"""How many bytes a step moves under a budget: the steps of a model, replayed as a trace.

[Note: what a plan replays]
Where there are few pages, steps of these very pages are made (``steps.py``) and replayed under the policy of a run.
Otherwise a module's pages are taken together in a few pieces, an expert or several each, and replayed under MIN, which
a run comes close to. Of some steps the last ones count. A recorded run knows besides which experts had tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megascale_omni.paging.budget import Budget, smallest_budget
from megascale_omni.paging.recorder import described
from megascale_omni.paging.replay import PolicyName, replay
from megascale_omni.paging.trace import Op, Trace, TracedModel
from megascale_omni.paging.traced_slots import needs_of
from megascale_omni.planner.state import RankState
from megascale_omni.planner.steps import Steps, Work, coarse_model, has_few_pages, wave_pages
from megascale_omni.schedule import Phase

MOST_MICRO_BATCHES = 5
"""More of them are a straight line on from the last two of these."""

STEPS, COUNTED = 5, 2
ROUTED = 34
"""Steps more where routers choose the experts, some steps fewer than others: all of them count."""

MOST_REPLAYED = 4096
"""Pages of a recorded run that are replayed under the policy of a run, which takes a second for each thousand uses."""


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


def step_traffic(state: RankState, work: Work, *, budget_bytes: int, seed: int = 0, least: bool = False) -> Traffic:
    """What a step moves, see [Note: what a plan replays]; or the ``least`` that can be moved, which is found sooner."""
    if budget_bytes >= state.total_bytes:
        return Traffic()
    if work.micro_batches > MOST_MICRO_BATCHES:
        few, more = (
            step_traffic(state, replace(work, micro_batches=count), budget_bytes=budget_bytes, seed=seed, least=least)
            for count in (MOST_MICRO_BATCHES - 1, MOST_MICRO_BATCHES)
        )
        times = work.micro_batches - MOST_MICRO_BATCHES
        return Traffic(more.passes.beyond(few.passes, times), more.step.beyond(few.step, times))
    if has_few_pages(state) and not least:
        model, scale = described(state.modules), 1.0
        policy: PolicyName = "ours"
        budget = Budget(nbytes=budget_bytes)
    else:
        (model, scale), policy = coarse_model(state), "min"
        work = replace(work, routed=None)  # pieces are not experts
        budget = Budget(fraction=min(1.0, max(budget_bytes / state.total_bytes, _floor(model))))
    batch = wave_pages(state) if policy == "ours" else 1
    steps, counted = STEPS, COUNTED
    if work.routed is not None:
        steps, counted = STEPS + ROUTED, COUNTED + ROUTED
    trace = Steps(model, work, batch=batch, seed=seed).trace(steps)
    moved = replay(trace, policy=policy, budget=budget, since=STEPS - COUNTED + 1, together=True)

    def moves(phases: Iterable[Phase]) -> Moves:
        columns = np.sum([moved.phases.get(phase.value, [0, 0]) for phase in phases], axis=0)
        return Moves(float(columns[0]) * scale / counted, float(columns[1]) * scale / counted)

    return Traffic(moves(phase for phase in Phase if phase is not Phase.STEP), moves((Phase.STEP,)))


def traced_traffic(trace: Trace, state: RankState, *, budget_bytes: int) -> Traffic:
    """What a step of a recorded run would have moved under a budget, on average over its steps: under the policy of a
    run, or, where there are very many pages, the least that can be moved.

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
    policy: PolicyName = "ours" if state.num_pages <= MOST_REPLAYED else "min"
    moved = replay(trace, policy=policy, budget=Budget(nbytes=budget_bytes), together=True)

    def moves(phases: Iterable[Phase]) -> Moves:
        columns = np.sum([moved.phases.get(phase.value, [0, 0]) for phase in phases], axis=0)
        return Moves(float(columns[0]) / steps, float(columns[1]) / steps)

    passes = (phase for phase in Phase if phase not in (Phase.STEP, Phase.EVAL))
    return Traffic(moves(passes), moves((Phase.STEP,)))


def _described(modules: list[tuple[int, int, int]]) -> str:
    experts, slices, nbytes = modules[0]
    more = "" if len(set(modules)) == 1 else ", others differ"
    return f"{len(modules)} modules of {experts} experts of {slices} pages of {nbytes} bytes in all planes{more}"


def _floor(model: TracedModel) -> float:
    return min(1.0, 1.01 * smallest_budget(needs_of(model)) / model.total_bytes)
