"""Heat in checkpoints: a resumed run, in whatever layout, freezes and wakes as if it had never ended."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from megascale_omni.config import HeatConfig
from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.heat.states import Heat
from megascale_omni.heat.stored import USES, Counts, combined
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import DEVICE
from tests.unit.checkpoint.runs import EXPERTS, MODULES, Layout, Run, ThreadRanks, load_newest, touched
from tests.unit.experts.paged import CPU

# Forwards are counted on every rank, of which another layout has another number: they have no weight here.
CONFIG = HeatConfig(
    refresh_steps=3, window_steps=9, cold_steps=2, frozen="reroute",
    compute_weight=0.8, memory_weight=0.0, communication_weight=0.2,
)  # fmt: skip
SAVED, LAST = 8, 25
"""The save falls between two looks at the heat map."""


class ThreadExchange:
    """Counts of ranks that are threads."""

    num_experts = EXPERTS

    def __init__(self, rank, first: int) -> None:
        self._rank, self.first = rank, first

    def total(self, counts: np.ndarray) -> np.ndarray:
        found = np.zeros((counts.shape[0], EXPERTS, 3), dtype=np.int64)
        for first, theirs in self._rank.gather((self.first, counts)):
            rows = slice(first, first + counts.shape[1])
            found[:, rows, :2] += theirs[..., :2]
            found[:, rows, 2] = np.maximum(found[:, rows, 2], theirs[..., 2])
        return found


def tokens(module: int, expert: int, step: int) -> int:
    """Of all ranks. An expert of each module rests for a while, and one has tokens now and then."""
    if expert == 3 - module and step > 2:
        return 0
    if expert == 1 and step % 8:
        return 0
    return 11 + 5 * expert + (7 * step + module) % 5


class Heated:
    """A rank of a run whose heat is kept."""

    def __init__(self, rank, layout: Layout, *, config: HeatConfig = CONFIG, manager: ExpertManager | None = None):
        self.run = Run(rank.rank, layout, manager=manager)
        self.manager = self.run.manager
        self.keeper = HeatKeeper(self.manager, config, clock=lambda: 0.0)
        self.replicas = layout.world // layout.ep
        self.seen: list[list[int]] = []
        if config.frozen == "reroute":
            self.keeper.agree(ThreadExchange(rank, self.run.first), awake=2)

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.manager.schedule.begin_step(number)
            for module, path in enumerate(MODULES):
                counts = []
                for local in range(self.run.modules[path].num_experts):
                    of_all = tokens(module, self.run.first + local, number)
                    counts.append(of_all // self.replicas + (self.run.replica < of_all % self.replicas))
                self.manager.routed(self.run.modules[path].pages, counts)
            self.run.step(number, touched(number))
            masks = [self.keeper.frozen(module) for module in range(len(MODULES))]
            self.seen += [[] if mask is None else np.flatnonzero(mask).tolist() for mask in masks]


def resumed(root, source: Layout, target: Layout) -> list[list[int]]:
    """Whom routers leave out, step by step and module by module, in a run that is saved, and goes on elsewhere."""

    def before(rank) -> list[list[int]]:
        heated = Heated(rank, source)
        heated.steps(1, SAVED)
        Checkpointer(root, ranks=rank).save(heated.run.state(), SaveRequest(tag="t", step=SAVED))
        return heated.seen

    def after(rank) -> list[list[int]]:
        heated = Heated(rank, target)
        load_newest(Checkpointer(root, ranks=rank), heated.run)
        heated.steps(SAVED + 1, LAST)
        return heated.seen

    first, second = ThreadRanks(source.world).run(before), ThreadRanks(target.world).run(after)
    for found in (first, second):
        assert all(seen == found[0] for seen in found), "ranks decide alike"
    return first[0] + second[0]


@pytest.fixture(scope="module")
def straight() -> list[list[int]]:
    def whole(rank) -> list[list[int]]:
        heated = Heated(rank, Layout())
        heated.steps(1, LAST)
        return heated.seen

    (found,) = ThreadRanks(1).run(whole)
    at_save = found[: SAVED * len(MODULES)][-len(MODULES) :]
    assert any(at_save), "somebody is left out when it is saved"
    assert found[-len(MODULES) :] != at_save, "and others at the end"
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(), Layout()),
        (Layout(4, ep=2), Layout()),
        (Layout(), Layout(4, ep=2)),
        (Layout(4, ep=4), Layout(2, ep=2)),
        (Layout(3), Layout(2)),
    ],
    ids=["same", "ep2dp2 to 1", "1 to ep2dp2", "ep4 to ep2", "dp3 to dp2"],
)
def test_a_resumed_run_leaves_out_the_same_experts(tmp_path, straight, source, target):
    assert resumed(tmp_path, source, target) == straight


def test_frozen_experts_are_away_and_known_after_a_restart(tmp_path):
    config = HeatConfig(refresh_steps=3, window_steps=9, cold_steps=2, alarm_hours=0)

    def begun(rank) -> Heated:
        options = PagingOptions(device_budget=Budget(fraction=1.0), disk_path=tmp_path)
        return Heated(rank, Layout(), config=config, manager=ExpertManager(device=CPU, options=options, poison=True))

    def before(rank):
        heated = begun(rank)
        heated.steps(1, SAVED)
        Checkpointer(tmp_path / "saved", ranks=rank).save(heated.run.state(), SaveRequest(tag="t", step=SAVED))
        heated.manager.close()
        return heated.keeper

    def after(rank):
        heated = begun(rank)
        load_newest(Checkpointer(tmp_path / "saved", ranks=rank), heated.run)
        keeper, manager = heated.keeper, heated.manager
        for flight in list(manager.pager.flights.values()):
            flight.future.result(timeout=30)
        manager.pager.poll()
        away = [manager.table.tier[manager.ids(manager.modules[m], Plane.WEIGHT, [e])] for m, e in keeper.frozen_at]
        manager.check_integrity()
        windows = [keeper.map.window(m) for m in range(len(MODULES))]
        manager.close()
        return keeper, away, windows

    (saved,), ((found, away, windows),) = ThreadRanks(1).run(before), ThreadRanks(1).run(after)
    assert saved.frozen_at
    assert saved.long_cold
    assert (found.frozen_at, found.long_cold) == (saved.frozen_at, saved.long_cold)
    assert all((tiers != DEVICE).all() for tiers in away)
    for module in range(len(MODULES)):
        assert (found.states[module] == saved.states[module]).all()
        assert (windows[module] == saved.map.window(module)).all()
        assert (found.map.idle_steps(module) >= 0).all()
    assert {int(s) for states in found.states.values() for s in states} >= {Heat.FROZEN, Heat.WARM}


@given(st.data())
def test_shares_add_up_to_what_all_ranks_saw(data):
    size = data.draw(st.integers(1, 5))
    slices = data.draw(st.integers(1, 4))
    owned = data.draw(st.lists(st.permutations(range(6)).map(lambda p: sorted(p[:3])), min_size=1, max_size=4))
    number = st.integers(0, 1000)
    stored = []
    for experts in owned:
        parts = data.draw(st.lists(st.lists(st.tuples(number, number, number), min_size=3, max_size=3), max_size=3))
        counts = Counts(
            np.array(parts, dtype=np.int64).reshape(-1, 3, 3), np.ones((3, 3), dtype=np.int64), np.arange(3), 1
        )
        stored.append({"experts": experts, "counts": json.loads(json.dumps(counts.as_json()))})
    whole = combined(stored, range(6), slices=slices)
    shares = [whole.share(rank, size) for rank in range(size)]
    assert np.array_equal(sum(share.parts for share in shares), whole.parts)
    assert np.array_equal(sum(share.open for share in shares), whole.open)
    assert whole.open[:, 0].sum() == 3 * len(owned), "every token is counted once"
    assert whole.open[:, USES].sum() == 3 * len(owned) * slices, "in pages as they are now"
    tokens_of_0 = sum(
        sum(part[item["experts"].index(0)][0] for part in item["counts"]["parts"])
        for item in stored
        if 0 in item["experts"]
    )
    assert whole.parts[:, 0, 0].sum() == tokens_of_0
