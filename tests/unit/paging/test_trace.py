"""Traces: what is written is read again; damaged and foreign files are refused; replays count what they should."""

import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni import cli
from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.heat.observation import Observation, path_of_rank
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.recorder import PHASES, Recorder
from megascale_omni.paging.replay import replay
from megascale_omni.paging.trace import Op, Trace, TracedModel, TracedModule, TraceWriter, read_trace
from megascale_omni.schedule import Phase
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of, train
from tests.unit.paging.small import Pages

SLOT = 4096


def model(*, modules: int = 1, experts: int = 4, floor: int = 2) -> TracedModel:
    """One-page experts, weights only."""
    kind = {"weight": f"float32 x {SLOT // 4}"}
    return TracedModel(
        tuple(TracedModule(f"m{n}", experts, 1, {"weight": SLOT}, kind, {"weight": floor}) for n in range(modules))
    )


def trace_of(described: TracedModel, *events: tuple[Op, list[int]]) -> Trace:
    numbers = [n for op, values in events for n in (int(op), len(values), *values)]
    return Trace(described, np.array(numbers, dtype=np.int32), whole=True)


def weight(index: int) -> int:
    return index * len(Plane)


def sweeps(order: list[list[int]], *, experts: int, phase: Phase = Phase.FORWARD) -> Trace:
    """Every page is made, then steps of one visit that uses pages one by one."""
    events = [(Op.CREATE, [weight(i)]) for i in range(experts)]
    for number, step in enumerate(order):
        events.append((Op.STEP, [number + 1]))
        events.append((Op.VISIT, [PHASES.index(phase), 0, 1 << int(Plane.WEIGHT), *sorted(step)]))
        for index in step:
            events += [(Op.HOLD, [weight(index)]), (Op.REACH, [index]), (Op.RELEASE, [weight(index)])]
    return trace_of(model(experts=experts), *events)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    events = [(Op.STEP, [1]), (Op.CREATE, [0, 5]), (Op.HOLD, [0]), (Op.RELEASE, [0]), (Op.DROP, [5]), (Op.HOLD, [])]
    with TraceWriter(tmp_path / "t") as writer:
        writer.model(model())
        for op, numbers in events:
            writer.event(op, numbers)
        writer.flush()
        writer.event(Op.REACH, [3])
    trace = read_trace(tmp_path / "t")
    assert trace.whole
    assert trace.model == model()
    assert [(e.op, e.numbers.tolist()) for e in trace] == [*events, (Op.REACH, [3])]


def test_a_trace_that_was_cut_off_is_read_up_to_there(tmp_path):
    path = tmp_path / "t"
    with TraceWriter(path) as writer:
        writer.model(model())
        writer.event(Op.HOLD, [0])
        writer.flush()
        whole = path.stat().st_size
        writer.event(Op.HOLD, [5])
    data = path.read_bytes()
    for end in range(whole + 1, len(data)):
        path.write_bytes(data[:end])
        trace = read_trace(path)
        assert not trace.whole
        assert [e.numbers.tolist() for e in trace] == [[0]]


def test_damage_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "t"
    with TraceWriter(path) as writer:
        writer.model(model())
        writer.event(Op.HOLD, [0])
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(bytes([*data[:place], data[place] ^ 0x40, *data[place + 1 :]]))
        try:
            trace = read_trace(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert not trace.whole, place  # a length that goes beyond the end


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is no trace of MegaScale"), (b"MSTRACE1", "names no modules"), (b"PK..........", "is no trace")],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "t")


def file_of(path, described: TracedModel | bytes, events: bytes) -> None:
    """A trace whose frames are whole and may hold anything."""
    with TraceWriter(path) as writer:
        if isinstance(described, TracedModel):
            writer.model(described)
        else:
            writer._frame(b"M", described)
        if events:
            writer._frame(b"E", events)


GOOD = model()
OTHER_PLANES = replace(GOOD.modules[0], floor_pages={})


@pytest.mark.parametrize(
    ("described", "numbers", "message"),
    [
        (b"{", None, r"is damaged at byte 8 \("),
        (b"\xff", None, r"is damaged at byte 8 \("),
        (b"[3]", None, r"is damaged at byte 8 \("),
        (b'[{"experts": 3}]', None, r"is damaged at byte 8 \("),
        (GOOD, b"no stream", r"is damaged at byte \d+ \(Error"),
        (GOOD, zlib.compress(b"abc"), r"is damaged at byte \d+ \(buffer"),
        (GOOD, [3, -2, 1, 1], "does not fit its own model: an event of -2 numbers"),
        (GOOD, [3, 40, 1, 1], "does not fit its own model: an event of 40 numbers, where there are 2"),
        (GOOD, [3], "does not fit its own model"),
        (GOOD, [77, 0], "does not fit its own model: 77 is not a valid Op"),
        (GOOD, [1, 0], "does not fit its own model: step of"),
        (GOOD, [2, 2, 0, 0], "does not fit its own model: visit of"),
        (GOOD, [2, 3, 99, 0, 1], "does not fit its own model: visit of"),
        (GOOD, [2, 4, 0, 0, 1, 4], "does not fit its own model: visit of"),
        (GOOD, [3, 1, 1], "does not fit its own model: hold of"),  # a gradient, where there are weights only
        (model(experts=-1), None, "describes a module that cannot be: m0"),
        (replace(GOOD, modules=(OTHER_PLANES,)), None, "describes a module that cannot be: m0"),
    ],
)
def test_whole_frames_of_nonsense_are_refused(tmp_path, described, numbers, message):
    events = numbers or b""
    if isinstance(events, list):
        events = zlib.compress(np.array(events, dtype="<i4").tobytes())
    file_of(tmp_path / "t", described, events)
    with pytest.raises(ValueError, match=f"trace file .*t {message}"):
        read_trace(tmp_path / "t")


def test_a_trace_without_uses_is_not_replayed(tmp_path, capsys):
    file_of(tmp_path / "t", GOOD, b"")
    assert cli.main(["trace", "replay", str(tmp_path / "t")]) == 1
    assert "holds no use of a page: the run ended before its first step" in capsys.readouterr().err
    kind = replace(GOOD.modules[0], slot_kind={"weight": "floats"})
    file_of(tmp_path / "u", replace(GOOD, modules=(kind,)), zlib.compress(np.array([3, 1, 0], dtype="<i4").tobytes()))
    assert cli.main(["trace", "replay", str(tmp_path / "u")]) == 1
    assert "the trace has pages of 'floats', which is no dtype and number of elements" in capsys.readouterr().err


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"trace file .*nowhere cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"trace file .* cannot be written: No such file"):
        TraceWriter(tmp_path / "no folder" / "t")


def test_events_of_another_model_are_refused(tmp_path):
    with TraceWriter(tmp_path / "t") as writer:
        writer.model(model(experts=2))
        writer.event(Op.HOLD, [weight(7)])
    with pytest.raises(
        ValueError, match="does not fit its own model: hold of a page, phase or module that it does not have"
    ):
        read_trace(tmp_path / "t")


def test_ranks_have_files_of_their_own():
    assert path_of_rank("a/run.trace", rank=0, world=1).as_posix() == "a/run.trace"
    assert path_of_rank("a/run.trace", rank=3, world=4).as_posix() == "a/run.rank3.trace"


# -- recording ---------------------------------------------------------------------------------------------------------

TASK = Task(steps=5, modules=3, experts=8, active=4, micro_batches=2)


def record(path, task: Task = TASK) -> Trace:
    """A training with every page resident."""
    with batches_of(task):
        trained = Model(task, ALL)
        observation = Observation(
            trained.manager, heat=HeatConfig(enabled=False), observe=ObserveConfig(trace=str(path))
        )
        for number in range(1, task.steps + 1):
            trained.step(number, Trained())
        observation.close()
        observation.close()
        assert not trained.manager.observers
    return read_trace(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Trace:
    return record(tmp_path_factory.mktemp("trace") / "t")


def test_a_recorded_run_tells_its_steps_visits_and_pages(recorded):
    assert [module.path for module in recorded.model.modules] == [f"layers.{n}.experts" for n in range(3)]
    assert [e.numbers.tolist() for e in recorded if e.op is Op.STEP] == [[n] for n in range(1, 6)]
    phases = {PHASES[int(e.numbers[0])] for e in recorded if e.op is Op.VISIT}
    assert phases == {Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.EVAL}
    held: dict[int, int] = {}
    for event in recorded:
        for page in event.numbers.tolist() if event.op in (Op.HOLD, Op.RELEASE) else ():
            held[page] = held.get(page, 0) + (1 if event.op is Op.HOLD else -1)
            assert held[page] >= 0
    assert held
    assert not any(held.values())


def test_recording_changes_no_bit_of_a_training(tmp_path):
    with batches_of(TASK):
        trained, found = Model(TASK, ALL), Trained()
        recorder = Recorder(trained.manager, tmp_path / "t")
        for number in range(1, TASK.steps + 1):
            trained.step(number, found)
        trained.export(found)
        recorder.close()
    assert not found.differs_from(train(TASK))


def test_a_replay_of_ours_moves_what_a_run_moved(tmp_path):
    """The same decisions, where io is as quick as thought: one slot class, a mover that finishes when asked."""
    pages = Pages(tmp_path, experts=6, slots=3)
    recorder = Recorder(pages.manager, tmp_path / "t")
    generator = torch.Generator().manual_seed(3)
    before = pages.counts.get("pages_loaded", 0)
    for step in range(1, 30):
        pages.manager.schedule.begin_step(step)
        active = [(int(e), 0) for e in torch.randperm(6, generator=generator)[:4].sort()[0]]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for _ in pages.manager.sweep(pages.module, active, planes=(Plane.WEIGHT,), phase=phase):
                pages.jobs.complete_all()
    recorder.close()
    loaded = pages.counts["pages_loaded"] - before
    trace = read_trace(tmp_path / "t")
    (module,) = trace.model.modules  # whose floor would be all six pages, for want of a smaller batch
    trace = replace(trace, model=TracedModel((replace(module, floor_pages={"weight": 1}),)))
    slots = Budget(nbytes=3 * pages.slot_class.nbytes)
    with_prefetch = replay(trace, policy="ours", budget=slots).page_ins
    assert abs(loaded - with_prefetch) <= 0.1 * with_prefetch
    assert replay(trace, policy="min", budget=slots).page_ins <= with_prefetch


# -- policies ----------------------------------------------------------------------------------------------------------


def page_ins(trace: Trace, policy, slots: int, **options) -> int:
    return replay(trace, policy=policy, budget=Budget(nbytes=slots * SLOT), **options).page_ins


def brute_force(uses: list[int], slots: int, created: int) -> int:
    """The fewest page-ins there can be, by trying every victim."""
    states = {frozenset(range(min(created, slots))): 0} if created <= slots else None
    if states is None:
        states = {frozenset(): 0}
        for page in range(created):
            states = _after(states, page, slots, cost=0)
    for page in uses:
        states = _after(states, page, slots, cost=1)
    return min(states.values())


def _after(states: dict[frozenset, int], page: int, slots: int, *, cost: int) -> dict[frozenset, int]:
    found: dict[frozenset, int] = {}
    for here, paid in states.items():
        if page in here:
            options, price = [here], paid
        else:
            full = len(here) >= slots
            options = [(here - {v}) | {page} for v in here] if full else [here | {page}]
            price = paid + cost
        for option in options:
            found[option] = min(found.get(option, price), price)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=1, max_size=5),
    st.integers(2, 4),
)
def test_min_is_the_least_there_can_be_and_nobody_has_less(order, slots):
    trace = sweeps([sorted(step) for step in order], experts=5)
    least = page_ins(trace, "min", slots)
    assert least == brute_force([page for step in order for page in sorted(step)], slots, created=5)
    for policy in ("lru", "ours"):
        for prefetch in (True, False):
            assert page_ins(trace, policy, slots, prefetch=prefetch) >= least


def test_lru_on_cyclic_sweeps_misses_all_and_ours_as_few_as_min():
    trace = sweeps([[0, 1, 2, 3, 4, 5]] * 10, experts=6)
    assert page_ins(trace, "lru", 4) == 60
    assert page_ins(trace, "ours", 4, prefetch=False) <= page_ins(trace, "min", 4) + 6, "the first step is unknown"


def test_evaluation_sweeps_are_no_worse_than_min_once_they_are_known():
    trace = sweeps([[0, 1, 2, 3, 4, 5]] * 10, experts=6, phase=Phase.EVAL)
    assert page_ins(trace, "ours", 4, prefetch=False) <= page_ins(trace, "min", 4) + 12 < page_ins(trace, "lru", 4)


@pytest.mark.parametrize("percent", [20, 30, 50])
def test_ours_is_between_min_and_lru_on_a_training(recorded, percent):
    found = {p: replay(recorded, policy=p, budget=Budget(fraction=percent / 100)) for p in ("lru", "ours", "min")}
    assert found["min"].bytes_in <= found["ours"].bytes_in < found["lru"].bytes_in
    assert found["ours"].prefetched_bytes > found["ours"].demanded_bytes > 0
    assert found["lru"].prefetched_bytes == found["min"].prefetched_bytes == 0
    assert len({m.used_bytes for m in found.values()}) == 1


def test_with_room_for_everything_nothing_moves(recorded):
    for policy in ("lru", "ours", "min"):
        found = replay(recorded, policy=policy, budget=Budget())
        # The trace began after the pages were made: each comes once.
        assert found.page_ins <= 8 * 3 * len(Plane) * recorded.model.modules[0].slices
        assert found.written_bytes == 0


def test_budgets_that_are_too_small_and_policies_that_are_unknown_are_refused(recorded):
    with pytest.raises(ValueError, match=r"budget 4096 bytes is too small for this model: \d+ bytes are needed"):
        replay(recorded, policy="lru", budget=Budget(nbytes=4096))
    with pytest.raises(ValueError, match="policy 'fifo' is unknown; choose among lru, ours, min"):
        replay(
            recorded,
            policy="fifo",  # type: ignore[arg-type]
            budget=Budget(),
        )


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_shows_and_replays(tmp_path, capsys):
    path = tmp_path / "t"
    record(path)
    assert cli.main(["trace", "show", str(path)]) == 0
    assert "layers.2.experts: 8 experts of 3 pages" in capsys.readouterr().out
    arguments = ["trace", "replay", str(path), "--budget", "30%,50%", "--json", str(tmp_path / "j")]
    assert cli.main(arguments) == 0
    content = json.loads((tmp_path / "j").read_text())
    assert [(r["budget"], r["policy"]) for r in content["replays"]] == [
        (b, p) for b in ("30%", "50%") for p in ("lru", "ours", "min")
    ]
    assert all(r["bytes_in"] == r["demanded_bytes"] + r["prefetched_bytes"] > 0 for r in content["replays"])
    assert "1.00x" in capsys.readouterr().out
    assert cli.main([*arguments, "--together"]) == 0  # only `ours` decides when its pages begin to leave
    together = json.loads((tmp_path / "j").read_text())
    for before, after in zip(content["replays"], together["replays"], strict=True):
        assert (before == after) or before["policy"] == "ours"
    assert content != together


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "fifo"], "policy 'fifo' is unknown"),
        (["--budget", "1"], "is too small for this model"),
        (["--budget", "soon"], "--budget='soon' is not a size"),
        (["--budget", "50%,"], "--budget='' is not a size"),
        (["--json", "no folder/j"], "--json=no folder/j cannot be written: give a file in a folder that is there"),
        (["--json", "/"], "--json=/ cannot be written"),
    ],
)
def test_mistakes_of_the_command_are_messages(tmp_path, capsys, flags, message):
    path = tmp_path / "t"
    record(path)
    assert cli.main(["trace", "replay", str(path), *flags]) == 1
    assert message in capsys.readouterr().err
