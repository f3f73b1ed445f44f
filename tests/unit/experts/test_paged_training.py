"""Where pages are changes no bit of a training: budgets, prefetch, host memory, slow disks, large experts."""

from functools import cache

import pytest
import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from scripts.measurements.paging_model import Task, Trained, smallest_budget_of, train
from tests.unit.paging.movers import ManualMover, SlowMover

BF16 = torch.bfloat16
TASKS = {
    "fp32": Task(steps=3),
    "bf16, recompute": Task(dtype=BF16, recompute=True, steps=2),
    "L2 decay, a lag of 2": Task(decoupled=False, max_lag=2, steps=5, micro_batches=1, active=2, evaluate=False),
    "no lag, no biases": Task(max_lag=0, bias=False, steps=2),
    "whole experts": Task(rows=40, modules=3, steps=3, micro_batches=1),
}
BUDGETS = {"100 %": 1.0, "50 %": 0.5, "25 %": 0.25, "smallest": None}
CASES = [("fp32", budget) for budget in BUDGETS]
CASES += [(name, budget) for name in list(TASKS)[1:] for budget in ("25 %", "smallest")]


@cache
def resident(name: str) -> Trained:
    return train(TASKS[name])


def options(name: str, budget: float | None, folder, **more) -> PagingOptions:
    smallest = Budget(nbytes=smallest_budget_of(TASKS[name]))
    return PagingOptions(
        device_budget=smallest if budget is None else Budget(fraction=budget),
        disk_path=folder,
        checksum="crc32",
        **more,
    )


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_another_budget_changes_no_bit(name, budget, tmp_path, seed):
    """The disk is slow at random, which lets loads, saves and computation meet in every order."""
    found = train(TASKS[name], options(name, BUDGETS[budget], tmp_path), mover=SlowMover(seed), check=True)
    assert found.differs_from(resident(name)) == []
    assert (found.counts.get("pages_loaded", 0) > 50) == (budget != "100 %")


@pytest.mark.parametrize(("name", "budget"), [("fp32", 0.5), ("bf16, recompute", None)])
def test_without_prefetch_and_with_host_memory_no_bit_changes(name, budget, tmp_path, seed):
    fetched = train(TASKS[name], options(name, budget, tmp_path, prefetch=False), mover=SlowMover(seed))
    assert fetched.differs_from(resident(name)) == []
    assert fetched.counts["page_faults"] == fetched.counts["pages_loaded"]
    hosted = train(TASKS[name], options(name, budget, tmp_path, host_budget=Budget(fraction=0.4)), check=True)
    assert hosted.differs_from(resident(name)) == []
    assert hosted.counts.get("bytes_written", 0) < fetched.counts["bytes_written"]


@pytest.mark.parametrize("order", range(3))
def test_io_that_ends_in_any_order_changes_no_bit(order, tmp_path):
    """Nothing ends before the main thread waits for something; then whatever is drawn."""
    found = train(TASKS["fp32"], options("fp32", 0.25, tmp_path), mover=ManualMover(order), check=True)
    assert found.differs_from(resident("fp32")) == []


def test_an_expert_larger_than_the_budget_trains_to_the_same_bits(tmp_path, seed):
    task = Task(experts=2, active=2, ffn=256, rows=16, steps=2, micro_batches=1, batch_bytes=1)
    budget = smallest_budget_of(task)
    page = task.layout.slot_class(torch.float32).nbytes
    assert task.layout.num_slices * page >= 2 * budget  # its weights alone
    paging = PagingOptions(device_budget=Budget(nbytes=budget), disk_path=tmp_path)
    found = train(task, paging, mover=SlowMover(seed), check=True)
    assert found.differs_from(train(task)) == []


def test_micro_batches_add_to_one_gradient_page_however_often_it_leaves_in_between(tmp_path, seed):
    task = Task(experts=3, active=3, modules=1, micro_batches=4, steps=2, batch_bytes=1)
    paging = PagingOptions(device_budget=Budget(nbytes=smallest_budget_of(task)), disk_path=tmp_path)
    found = train(task, paging, mover=SlowMover(seed), check=True)
    assert found.differs_from(train(task)) == []


def test_another_start_is_another_result():
    """The comparison above would see it."""
    other = train(Task(seed=1))
    assert {"losses", "layers.0.experts.local_experts.0.linear_fc1.weight.weight"} <= set(
        other.differs_from(resident("fp32"))
    )
