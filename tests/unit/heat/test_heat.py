"""Heat: states from counts, freezing and waking through a manager, reports and their pictures."""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image

from megascale_omni import cli
from megascale_omni.cli import heat as heat_command
from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.heat.agreement import Alone, Exchange, spared
from megascale_omni.heat.heatmap import COMPUTE, MEMORY
from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.heat.observation import Observation, check_paths, draw_report
from megascale_omni.heat.report import read_report
from megascale_omni.heat.states import Heat, Snapshot, classify, scores, to_freeze, to_probe
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of, train
from tests.unit.paging.small import Pages

CONFIG = HeatConfig()
F, C, W, H = Heat.FROZEN, Heat.COLD, Heat.WARM, Heat.HOT


def snapshot(compute, idle=0, states=W, pending=False) -> Snapshot:
    size = len(compute)
    metrics = np.zeros((size, 3))
    metrics[:, COMPUTE] = metrics[:, MEMORY] = compute
    fill = lambda value, dtype: np.broadcast_to(np.array(value, dtype=dtype), size).copy()  # noqa: E731
    return Snapshot(metrics, fill(idle, np.int64), fill(states, np.int8), fill(pending, bool))


# -- policy ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A module's experts and the states they get."""

    why: str
    seen: Snapshot
    states: tuple[Heat, ...]
    frozen: tuple[int, ...] = ()


ROWS = [
    Row("balanced experts are all warm", snapshot([5, 5, 5, 5]), (W, W, W, W)),
    Row("even where they have been idle for ever alike", snapshot([5, 5, 5, 5], idle=90), (W, W, W, W)),
    Row("the busiest is hot", snapshot([1, 2, 3, 40]), (W, W, W, H)),
    Row("the least used is cold once it is idle", snapshot([0, 9, 9, 9], idle=[5, 0, 0, 0]), (C, W, W, W), (0,)),
    Row("not before", snapshot([0, 9, 9, 9], idle=[4, 0, 0, 0]), (W, W, W, W)),
    Row("idle but well used is warm", snapshot([8, 9, 9, 7], idle=[9, 0, 0, 0]), (W, W, W, W)),
    Row("all that never had a token", snapshot([0, 0, 0, 9], idle=[9, 9, 9, 0]), (C, C, C, H), (0, 1, 2)),
    Row("what is frozen stays so", snapshot([3, 9, 9, 9], idle=[10, 0, 0, 0], states=[F, W, W, W]), (F, W, W, W)),
    Row("until it gets a token", snapshot([3, 9, 9, 9], idle=[2, 0, 0, 0], states=[F, W, W, W]), (W, W, W, W)),
    Row("not with a gradient to apply", snapshot([0, 9], idle=[9, 0], pending=[True, False]), (C, H)),
    Row("one expert alone", snapshot([5]), (W,)),
    Row("none at all", snapshot([]), ()),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.why)
def test_states(row: Row):
    states = classify(row.seen, CONFIG)
    assert tuple(states.tolist()) == row.states
    assert tuple(to_freeze(row.seen, states, CONFIG).tolist()) == row.frozen
    assert not len(to_freeze(row.seen, states, HeatConfig(freeze=False)))


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_scores_lie_between_0_and_1_and_follow_use(compute):
    found = scores(snapshot(compute).metrics, CONFIG)
    assert ((found >= 0) & (found <= 1 + 1e-9)).all()
    assert found.argmax() in np.flatnonzero(np.array(compute) == max(compute))


def test_weights_decide_what_a_score_is():
    metrics = np.array([[10.0, 0, 0], [0, 10, 0], [0, 0, 10]])
    assert scores(metrics, CONFIG).tolist() == pytest.approx([0.5, 0.3, 0.2])
    only = HeatConfig(compute_weight=0, memory_weight=1, communication_weight=0)
    assert scores(metrics, only).tolist() == [0, 1, 0]


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(0, 200))
def test_probes_take_turns(frozen, turn):
    states = np.array([F] * frozen + [W] * 3)
    assert not len(to_probe(states, before=1.0, now=1.0, turn=turn, share=0.05)), "the threshold did not rise"
    found = to_probe(states, before=1.0, now=1.5, turn=turn, share=0.05)
    assert len(found) == max(1, int(0.05 * frozen))
    assert (found < frozen).all()
    turns = -(-frozen // len(found))
    seen = {e for t in range(turns) for e in to_probe(states, before=0, now=1, turn=t, share=0.05).tolist()}
    assert seen == set(range(frozen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cold_percentile": 95}, r"cold_percentile=95 is not below hot_percentile=90.*lower the one"),
        ({"alarm_percentile": 40}, r"alarm_percentile=40 is above cold_percentile=30"),
        ({"compute_weight": 0.9}, r"compute_weight 0.9, .* add up to 1.4; they must add up to 1"),
        ({"window_steps": 5}, r"window_steps=5 is shorter than refresh_steps=10"),
        ({"cold_steps": 0}, r"heat\.cold_steps=0 must be a whole number of steps, 1 or more"),
        ({"probe_share": 2}, r"heat\.probe_share=2 must be between 0 and 1"),
        ({"hot_percentile": "90"}, r"heat\.hot_percentile='90' must be a percentile between 0 and 100"),
        ({"freeze": "yes"}, r"heat\.freeze='yes' must be true or false"),
        ({"alarm_hours": -1}, r"heat\.alarm_hours=-1 must be 0 or more"),
    ],
)
def test_thresholds_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HeatConfig(**options)


# -- freezing and waking -----------------------------------------------------------------------------------------------

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


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    task = Task(steps=8, modules=2, experts=8, active=2)
    with batches_of(task):
        options = PagingOptions(device_budget=Budget(fraction=0.5), disk_path=folder)
        model = Model(task, options)
        heat = HeatConfig(refresh_steps=2, window_steps=4, cold_steps=1)
        observation = Observation(model.manager, heat=heat, observe=ObserveConfig(report=str(folder / "run")))
        for number in range(1, task.steps + 1):
            model.step(number, Trained())
        observation.close()
        observation.close()
        counts = model.manager.stats()
        model.manager.close()
    return folder / "run", counts


def test_a_report_tells_every_step_and_every_look(report):
    folder, counts = report
    (found,) = read_report(folder)
    assert [line["step"] for line in found.steps] == list(range(1, 8))
    assert [line["step"] for line in found.heat] == [2, 4, 6]
    assert [m["path"] for m in found.modules] == ["layers.0.experts", "layers.1.experts"]
    assert all(len(states) == 8 for line in found.heat for states in line["states"])
    assert found.limit_bytes
    for line in found.steps:
        assert line["tiers"]["device"] == sum(line["planes"].values()) <= found.limit_bytes
    assert 0 < found.steps[-1]["counts"]["bytes_loaded"] <= counts["bytes_loaded"]


@pytest.mark.parametrize("name", ["heat.png", "residency.png"])
def test_pictures_are_drawn_at_the_end(report, name):
    pixels = image.imread(report[0] / name)
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("command", ["heat", "residency"])
def test_commands_print_and_draw(report, command, tmp_path, capsys):
    png = tmp_path / "a.png"
    assert cli.main([command, str(report[0]), "--png", str(png)]) == 0
    assert image.imread(png).size
    text = capsys.readouterr().out
    assert "layer 1:" in text if command == "heat" else "page faults:" in text


@pytest.mark.parametrize(
    ("experts", "state", "told"),
    [
        ([2, 5], "hot", "2 hot (2 5)"),
        ([], "frozen", "0 frozen"),
        ([0, 1], "warm", "2 warm"),
        (range(17), "cold", "17 cold"),
    ],
)
def test_a_short_list_of_experts_is_named(experts, state, told):
    assert heat_command._told(experts, state) == told


def test_reports_of_several_ranks_are_shown_together(report, tmp_path, capsys):
    for rank in range(2):
        (tmp_path / f"rank{rank}.jsonl").write_text((report[0] / "rank0.jsonl").read_text())
    assert cli.main(["heat", str(tmp_path)]) == 0
    assert "rank 1, layer 0:" in capsys.readouterr().out
    assert len(draw_report(tmp_path)) == 2


def test_a_report_of_a_run_that_died_is_read_up_to_there(report, tmp_path):
    text = (report[0] / "rank0.jsonl").read_text()
    (tmp_path / "rank0.jsonl").write_text(text[:-20])
    (found,) = read_report(tmp_path)
    assert len(found.steps) + len(found.heat) == sum('"kind": "run"' not in x for x in text.splitlines()) - 1
    (tmp_path / "rank0.jsonl").write_text("nonsense\n" + text)
    with pytest.raises(ValueError, match=r"rank0.jsonl, line 1, is no line of a report"):
        read_report(tmp_path)


def test_what_is_no_report_or_too_short_a_one_is_refused(tmp_path, capsys):
    assert cli.main(["heat", str(tmp_path)]) == 1
    assert "holds no report of a run; make one with --megascale-report FOLDER" in capsys.readouterr().err
    (tmp_path / "rank0.jsonl").write_text(json.dumps({"kind": "run", "modules": [], "limit_bytes": None}) + "\n")
    assert cli.main(["heat", str(tmp_path)]) == 1
    assert cli.main(["residency", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("the run ended before") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trace": "none/t"}, r"observe\.trace=.*none/t cannot be written: there is no folder .*none; make it"),
        ({"trace": "."}, r"observe\.trace=.* is a folder; name a file in it \(--megascale-trace\)"),
        ({"trace": "file/t"}, r"there is no folder .*file"),
        ({"report": "file"}, r"observe\.report=.*file cannot be made: .*file is a file; give another folder"),
        ({"report": "file/deeper/r"}, r"cannot be made: .*file is a file"),
        ({"report": "taken"}, r"heat\.png in it is a folder; remove it"),
    ],
)
def test_what_cannot_be_written_is_said_before_training(tmp_path, options, message):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "heat.png").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    observe = ObserveConfig(**{key: str(tmp_path / value) for key, value in options.items()})
    pages = Pages(tmp_path, slots=6)
    with pytest.raises(ValueError, match=message):
        Observation(pages.manager, heat=HeatConfig(), observe=observe)
    assert not pages.manager.observers
    assert sorted(tmp_path.rglob("*")) == before, "nothing was made"


def test_a_folder_without_permission_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("megascale_omni.heat.observation.os.access", lambda path, mode: False)
    for observe in (ObserveConfig(trace=str(tmp_path / "t")), ObserveConfig(report=str(tmp_path / "new" / "r"))):
        with pytest.raises(ValueError, match=rf"cannot be written: no permission to write in {tmp_path}"):
            check_paths(observe)


def test_a_picture_that_cannot_be_drawn_at_the_end_is_told_in_the_log(tmp_path, caplog):
    kept = Kept(tmp_path)
    observation = Observation(kept.pages.manager, heat=QUICK, observe=ObserveConfig(report=str(tmp_path / "r")))
    for _ in range(4):
        kept.step([0, 1])
    (tmp_path / "r" / "heat.png").mkdir()
    with caplog.at_level(logging.ERROR):
        observation.close()
    (record,) = caplog.records
    assert "heat.png cannot be written" in record.message
    assert "draw it again: megascale heat" in record.message
