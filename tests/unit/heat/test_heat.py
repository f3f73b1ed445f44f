"""Freezing and waking through a manager, by one rank and by several that decide together."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from megascale_omni.config import HeatConfig
from megascale_omni.heat.agreement import Alone, Exchange, spared
from megascale_omni.heat.heatmap import COMPUTE, MEMORY
from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.heat.states import Heat
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of, train
from tests.unit.paging.small import Pages

F, C, W, H = Heat.FROZEN, Heat.COLD, Heat.WARM, Heat.HOT
QUICK = HeatConfig(refresh_steps=1, window_steps=4, cold_steps=2)


class Kept:
    """Six experts with room for all, of which some get tokens, and a keeper with a clock of its own."""

    def __init__(self, folder, config: HeatConfig = QUICK) -> None:
        self.now = 0.0
        self.pages = Pages(folder, slots=6)
        self.keeper = HeatKeeper(self.pages.manager, config, clock=lambda: self.now)
        self.number = 0
        self.step(range(6))

    def step(self, active) -> None:
        """A training step in which these experts get tokens (``{expert: tokens}`` or names)."""
        self.number += 1
        self.pages.manager.schedule.begin_step(self.number)
        counts = [active.get(e, 0) if isinstance(active, dict) else 10 * (e in active) for e in range(6)]
        self.pages.manager.routed(self.pages.module, counts)
        for expert in (e for e in range(6) if counts[e]):
            self.pages.manager.observers[0].visited(Visit(Phase.FORWARD, 0, (Plane.WEIGHT,)), np.array([expert]))
            self.pages.read(expert)

    def settle(self) -> None:
        self.pages.jobs.complete_all()
        self.pages.manager.pager.poll()

    @property
    def states(self) -> list[Heat]:
        return [Heat(s) for s in self.keeper.states[0].tolist()]


def test_a_cold_expert_is_frozen_and_a_token_wakes_it(tmp_path):
    kept = Kept(tmp_path)
    for _ in range(8):
        kept.step([0, 1, 2, 3, 4])
    kept.settle()
    assert kept.states[5] is F
    assert kept.pages.tier(5) == "evicted"
    assert [kept.pages.tier(e) for e in range(5)] == ["active"] * 5
    step, score = kept.keeper.frozen_at[0, 5]
    assert 0 < step < kept.number
    assert 0 <= score < 0.5
    kept.step([0, 1, 2, 3, 4, 5])
    assert kept.pages.tier(5) == "active"
    kept.step([0, 1, 2, 3, 4, 5])
    assert kept.states[5] is W
    assert (0, 5) not in kept.keeper.frozen_at
    assert kept.keeper.counts["frozen"] == kept.keeper.counts["woken"] == 1
    kept.pages.check()


def test_balanced_routing_freezes_nothing(tmp_path):
    kept = Kept(tmp_path, HeatConfig(refresh_steps=1, window_steps=4))
    for number in range(30):
        kept.step([(number + e) % 6 for e in range(4)])
    assert kept.keeper.counts["frozen"] == 0
    assert [kept.pages.tier(e) for e in range(6)] == ["active"] * 6


def test_frozen_experts_are_probed_when_traffic_comes_back(tmp_path):
    kept = Kept(tmp_path)
    for _ in range(8):
        kept.step({0: 100})
    kept.settle()
    assert kept.states.count(F) == 5
    for _ in range(6):
        kept.step({0: 100, 1: 90, 2: 90, 3: 90, 4: 90})
    kept.settle()
    assert kept.keeper.counts["probed"] > 0
    assert kept.states[5] in (W, F)
    kept.pages.check()


def test_a_probe_that_takes_too_long_wakes_nobody(tmp_path):
    kept = Kept(tmp_path, HeatConfig(refresh_steps=1, window_steps=4, cold_steps=2, probe_seconds=0.5))
    for _ in range(8):
        kept.step([0, 1, 2, 3, 4])
    kept.settle()
    module = kept.pages.module
    assert kept.keeper._probe(module, 5)
    ticks = iter([0.0, 0.7])
    kept.keeper._clock = lambda: next(ticks)
    assert not kept.keeper._probe(module, 5)


def test_experts_that_are_cold_for_long_raise_an_alarm_once(tmp_path, caplog):
    kept = Kept(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            kept.step([0, 1, 2, 3, 4])
            kept.now += 3600 * 4
    assert kept.keeper.long_cold == {(0, 5)}
    (record,) = caplog.records
    assert "experts, local expert 5 has been cold for 24 hours" in record.message
    kept.step([5])
    kept.step([5])
    assert not kept.keeper.long_cold


# -- ranks that decide together ----------------------------------------------------------------------------------------


class Meeting:
    """Two ranks on threads: each has half of a layer's experts, or both have all of them."""

    def __init__(self, *, replicas: bool) -> None:
        self.replicas = replicas
        self._barrier = threading.Barrier(2, timeout=20)
        self._counts: dict[int, np.ndarray] = {}

    def exchange(self, rank: int) -> Exchange:
        meeting = self

        class OfRank:
            num_experts = 6 if meeting.replicas else 12
            first = 0 if meeting.replicas else 6 * rank

            def total(self, counts: np.ndarray) -> np.ndarray:
                meeting._counts[rank] = counts
                meeting._barrier.wait()
                both = [meeting._counts[0], meeting._counts[1]]
                meeting._barrier.wait()
                if not meeting.replicas:
                    return np.concatenate(both, axis=1)
                return np.concatenate([(both[0] + both[1])[..., :2], np.maximum(both[0], both[1])[..., 2:]], axis=-1)

        return OfRank()


def together(folder, tokens: list[list[list[int]]], *, replicas: bool, config: HeatConfig = QUICK) -> list[Kept]:
    """Two keepers that went through steps (``tokens[rank][step]``: active experts) and agreed after each."""
    meeting, kept = Meeting(replicas=replicas), []
    for rank in range(2):
        (folder / str(rank)).mkdir()
        kept.append(Kept(folder / str(rank), config))
        kept[rank].keeper.agree(meeting.exchange(rank), awake=2)

    def live(rank: int) -> None:
        for active in tokens[rank]:
            kept[rank].step(active)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(live, range(2)))
    for one in kept:
        one.settle()
    return kept


@pytest.mark.parametrize("frozen", ["wake", "reroute"])
def test_replicas_freeze_what_none_of_them_needs(tmp_path, frozen):
    config = replace(QUICK, frozen=frozen)
    kept = together(tmp_path, [[[0, 1, 2]] * 9, [[0, 1, 3]] * 9], replicas=True, config=config)
    assert kept[0].states == kept[1].states
    assert [kept[0].states[e] for e in range(6)].count(F) == 2
    assert kept[0].states[4] is kept[0].states[5] is F
    assert kept[0].states[3] is not F, "the other one needs it"
    for one in kept:
        assert [one.pages.tier(e) for e in (3, 4, 5)] == ["active", "evicted", "evicted"]
        one.pages.check()
        out = one.keeper.frozen(0)
        assert (out is None) if frozen == "wake" else (out.tolist() == [False] * 4 + [True] * 2)  # type: ignore[union-attr]


def test_owners_know_the_states_of_all_experts_and_freeze_their_own(tmp_path):
    kept = together(
        tmp_path, [[[0, 1, 2, 3, 4, 5]] * 9, [[0, 1]] * 9], replicas=False, config=replace(QUICK, frozen="reroute")
    )
    out = [False] * 8 + [True] * 4
    assert [one.keeper.frozen(0).tolist() for one in kept] == [out, out]  # type: ignore[union-attr]
    assert kept[0].states.count(F) == 0
    assert [kept[1].states[e] is F for e in range(6)] == out[6:]
    assert kept[0].keeper.counts["frozen"] == 0
    assert kept[1].keeper.counts["frozen"] == 4


def test_routers_keep_as_many_experts_as_a_token_needs(tmp_path):
    config = replace(QUICK, frozen="reroute")
    kept = together(tmp_path, [[[0]] * 9, [[0]] * 9], replicas=True, config=config)
    assert kept[0].states.count(F) == 4
    assert spared(np.array([0, 2, 2, 1]), np.array([1, 2, 3]), np.array([0, 0.5, 0.1, 0.2]), awake=1).tolist() == [2, 3]
    assert not len(spared(np.array([0, 2]), np.array([1]), np.array([0.0, 0.0]), awake=1))


def test_where_ranks_agree_an_expert_that_is_probed_wakes_however_long_it_takes(tmp_path):
    """What a clock says differs from rank to rank."""
    config = replace(QUICK, frozen="reroute", probe_seconds=0.0)
    pages = Kept(tmp_path, config)
    pages.keeper.agree(Alone(6), awake=1)
    for _ in range(8):
        pages.step({0: 100})
    assert pages.states.count(F) == 5
    assert pages.keeper.frozen(0).sum() == 5  # type: ignore[union-attr]
    woken = 0
    for _ in range(6):
        pages.step({0: 100, 1: 90, 2: 90, 3: 90, 4: 90})
        woken += pages.keeper.counts["probed"]
    assert woken > 0
    assert pages.keeper.counts["woken"] >= pages.keeper.counts["probed"]


def test_nobody_is_left_out_before_ranks_have_agreed_how_many_a_token_needs(tmp_path):
    kept = Kept(tmp_path, replace(QUICK, frozen="reroute"))
    for _ in range(8):
        kept.step([0, 1])
    assert F not in kept.states
    assert kept.keeper.frozen(0) is None


def test_heat_and_freezing_change_no_bit_of_a_training_under_a_budget(tmp_path):
    task = Task(steps=8, modules=2, experts=8, active=2)
    found = Trained()
    with batches_of(task):
        model = Model(task, PagingOptions(device_budget=Budget(fraction=0.5), disk_path=tmp_path))
        keeper = HeatKeeper(model.manager, HeatConfig(refresh_steps=1, window_steps=3, cold_steps=1))
        for number in range(1, task.steps + 1):
            model.step(number, found)
            model.manager.check_integrity()
        model.export(found)
        model.manager.close()
    assert keeper.counts["frozen"] > 0
    assert keeper.counts["woken"] > 0
    assert not found.differs_from(train(task))


def test_recompute_and_evaluation_add_no_heat():
    task = Task(steps=1, recompute=False, evaluate=False)
    seen = []
    for recompute, evaluations in ((False, 0), (True, 3)):
        task = Task(steps=1, recompute=recompute, evaluate=False)
        with batches_of(task):
            model = Model(task, ALL)
            keeper = HeatKeeper(model.manager, HeatConfig())
            model.step(1, Trained())
            for _ in range(evaluations):
                with torch.no_grad():
                    model.forward(torch.Generator().manual_seed(1))
        keeper.map.end_part()
        for module in model.manager.modules:
            seconds = keeper.map.work_time.seconds(module.entry.module)
            assert seconds is not None
            assert ((seconds > 0) == (keeper.map.newest(module.entry.module)[:, COMPUTE] > 0)).all()
        seen.append([keeper.map.newest(m.entry.module) for m in model.manager.modules])
    for plain, other in zip(*seen, strict=True):
        assert (plain[:, COMPUTE] == other[:, COMPUTE]).all()
        assert (plain[:, MEMORY] == other[:, MEMORY]).all()
        assert plain[:, COMPUTE].any()


def test_a_forward_whose_graph_a_recompute_makes_adds_the_heat_of_a_forward():
    """Full recomputation runs a training forward without a graph."""
    task = Task(steps=1, recompute=False, evaluate=False)
    seen = []
    for graph in (True, False):
        with batches_of(task):
            model = Model(task, ALL)
            keeper = HeatKeeper(model.manager, HeatConfig())
            with torch.set_grad_enabled(graph), model.manager.schedule.enter(Phase.FORWARD):
                model.forward(torch.Generator().manual_seed(1))
        keeper.map.end_part()
        seen.append([keeper.map.newest(m.entry.module) for m in model.manager.modules])
    for plain, other in zip(*seen, strict=True):
        assert (plain[:, COMPUTE] == other[:, COMPUTE]).all()
        assert plain[:, COMPUTE].any()
