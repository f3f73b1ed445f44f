"""What a run says about its pages."""

import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, smallest_budget_of
from scripts.moe_trainer import paging

TASK = Task(steps=1)


def chunks(model: Model) -> list[torch.nn.Module]:
    return [torch.nn.Linear(1, 1), torch.nn.ModuleList(model.modules)]


def test_a_run_without_pages_says_nothing():
    assert paging.places([torch.nn.Linear(1, 1)]) is None
    assert paging.counters([torch.nn.Linear(1, 1)]) is None


def test_pages_that_never_leave_have_no_limit_and_no_counters():
    model = Model(TASK, PagingOptions())
    places = paging.places(chunks(model))
    assert places is not None
    assert places["device_bytes"] == "all"
    assert "disk_path" not in places
    assert paging.counters(chunks(model)) is None


def test_pages_that_may_leave_are_told_with_their_memory_and_folder(tmp_path):
    budget = smallest_budget_of(TASK)
    with batches_of(TASK):
        model = Model(TASK, PagingOptions(device_budget=Budget(nbytes=budget), disk_path=tmp_path))
        model.step(1, Trained())
    places, counters = paging.places(chunks(model)), paging.counters(chunks(model))
    assert places is not None
    assert places["disk_path"] == str(tmp_path)
    assert places["device_bytes"] == budget
    pages = TASK.modules * TASK.experts * TASK.layout.num_slices
    assert places["state_bytes"] == 4 * pages * TASK.layout.slot_class(torch.float32).nbytes
    assert counters is not None
    assert counters["pages_evicted"] > 0
    assert counters["bytes_loaded"] == counters["pages_loaded"] * TASK.layout.slot_class(torch.float32).nbytes
    model.manager.close()
