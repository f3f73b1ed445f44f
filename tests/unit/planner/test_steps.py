"""Steps that a plan makes are those of a run, event by event."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.recorder import Recorder, described
from megascale_omni.paging.trace import Op, Trace, read_trace
from megascale_omni.planner.models import model_card
from megascale_omni.planner.state import RankState, rank_state
from megascale_omni.planner.steps import Steps, Work, has_few_pages, wave_pages
from megascale_omni.planner.traffic import step_traffic
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of

TASK = Task(
    steps=4, modules=2, experts=4, active=4, tokens=64, hidden=32, ffn=32, rows=16, bias=False, micro_batches=2,
    evaluate=False,
)  # fmt: skip


def events(trace: Trace, step: int) -> list[tuple[Op, list[int]]]:
    """Of one step. What a lease holds at once or page by page makes no difference."""
    found: list[tuple[Op, list[int]]] = []
    at = 0
    for event in trace:
        if event.op is Op.STEP:
            at = int(event.numbers[0])
        elif at == step and event.op is Op.VISIT:
            found.append((event.op, event.numbers.tolist()))
        elif at == step and event.op in (Op.CREATE, Op.HOLD, Op.WRITE, Op.DROP, Op.REACH):
            found += [(event.op, [number]) for number in event.numbers.tolist()]
    return found


@pytest.mark.parametrize("clip", [0.5, 0.0], ids=["at the end", "in the backward"])
def test_steps_of_a_plan_are_those_of_a_run(tmp_path, clip):
    task = Task(**{**TASK.__dict__, "clip": clip})
    with batches_of(task):
        model = Model(task, ALL)
        recorder = Recorder(model.manager, tmp_path / "run.trace")
        for number in range(1, task.steps + 1):
            model.step(number, Trained())
        recorder.close()
        state = RankState(model.manager.modules)
        assert has_few_pages(state)
        run = read_trace(tmp_path / "run.trace")
        work = Work(task.micro_batches, 1.0, gradient_sweep=False, step_in_backward=not clip)
        made = Steps(described(state.modules), work, batch=wave_pages(state), seed=0).trace(task.steps)
    assert len({m.slot_class(p) for m in state.modules for p in m.dtypes}) == 1
    assert state.modules[0].dtypes[next(iter(state.modules[0].dtypes))] is torch.float32
    for op in (Op.VISIT, Op.CREATE, Op.HOLD, Op.WRITE, Op.DROP, Op.REACH):
        of_run, of_plan = ([numbers for o, numbers in events(t, 4) if o is op] for t in (run, made))
        assert of_plan == of_run, op.name


def test_a_plan_moves_what_a_run_moves(tmp_path):
    """Nearly, whatever io threads do: dirty pages begin to leave together, and a clean one is sooner reached."""
    task = Task(
        steps=8, modules=2, experts=16, active=16, tokens=256, hidden=32, ffn=32, rows=16, bias=False, micro_batches=1,
        evaluate=False,
    )  # fmt: skip
    with batches_of(task):
        options = PagingOptions(device_budget=Budget(fraction=0.3), disk_path=tmp_path)
        model, moved = Model(task, options), []
        for number in range(1, task.steps + 1):
            model.step(number, Trained())
            counts = model.manager.stats()
            moved.append(counts["bytes_loaded"] + counts["bytes_written"])
        state = RankState(model.manager.modules)
        model.manager.close()
        work = Work(1, 1.0, gradient_sweep=False)
        planned = step_traffic(state, work, budget_bytes=int(0.3 * state.total_bytes)).all
    found = (moved[-1] - moved[3]) / (task.steps - 4)
    assert planned.loaded_bytes + planned.written_bytes == pytest.approx(found, rel=0.08)


def test_experts_that_routers_chose_are_those_of_the_steps():
    """Forward by forward, over and over; layers of a smaller model stand for those next to them."""
    model = described(_state(modules=4).modules)
    routed = (((0,), (1, 2)), ((3,), (0, 1, 2, 3)))
    trace = Steps(model, Work(1, 0.5, routed=routed), batch=1, seed=0).trace(3)
    for step, (first, second) in enumerate((*routed, routed[0]), start=1):
        numbers = [numbers for op, numbers in events(trace, step) if op is Op.VISIT]
        forward = [tuple(visit[3:]) for visit in numbers[:4]]
        assert forward == [first, first, second, second]


def test_what_a_plan_moves_follows_what_routers_chose():
    state = _state(modules=2)
    budget = state.total_bytes // 2
    few, all_ = (((0, 1),) * 2,), (tuple(range(4)),) * 2
    found = [
        step_traffic(state, Work(1, 1.0, routed=routed), budget_bytes=budget).all.loaded_bytes
        for routed in (few, (all_,))
    ]
    assert 0 <= found[0] < found[1]
    with mock.patch("megascale_omni.planner.traffic.has_few_pages", return_value=False):
        coarse = step_traffic(state, Work(1, 1.0, routed=few), budget_bytes=budget).all.loaded_bytes
    assert coarse > found[0], "pieces are not experts"


def _state(*, modules: int) -> RankState:
    """Modules of four experts, a page each."""
    sizes = {"num_layers": modules, "hidden_size": 32, "num_attention_heads": 1, "num_experts": 4}
    card = model_card({**sizes, "moe_ffn_hidden_size": 32, "disable_bias_linear": True}, name="small")
    return rank_state(card, page_bytes=64 * 1024, expert_parallel=1, pipeline_parallel=1, fp32_gradients=True)
