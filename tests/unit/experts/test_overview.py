"""What a run says about its pages."""

import pytest
import torch

from megascale_omni.experts.overview import Overview, announce, counters, in_words
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, smallest_budget_of

TASK = Task(steps=1)
PAGES = TASK.modules * TASK.experts * TASK.layout.num_slices
PAGE_BYTES = TASK.layout.slot_class(torch.float32).nbytes


def chunks(model: Model) -> list[torch.nn.Module]:
    return [torch.nn.Linear(1, 1), torch.nn.ModuleList(model.modules)]


def test_a_run_without_pages_says_nothing(capsys: pytest.CaptureFixture[str]):
    stock = [torch.nn.Linear(1, 1)]
    assert Overview.of(stock) is None
    assert counters(stock) is None
    assert not announce(stock, rank=0, world=1)
    assert capsys.readouterr().out == ""


def test_pages_that_never_leave_have_no_limit_and_no_counters(capsys: pytest.CaptureFixture[str]):
    model = Model(TASK, PagingOptions())
    overview = Overview.of(chunks(model))
    assert overview is not None
    assert (overview.layers, overview.experts) == (TASK.modules, TASK.modules * TASK.experts)
    assert overview.device_bytes is None
    assert overview.record()["device_bytes"] == "all"
    assert Overview.from_record(overview.record()) == overview
    assert counters(chunks(model)) is None
    assert announce(chunks(model), rank=0, world=2)
    assert capsys.readouterr().out == f"megascale: {overview} (rank 0 of 2)\n"
    assert str(overview).endswith("with optimizer state: all in memory")


def test_pages_that_may_leave_are_told_with_their_memory_and_folder(tmp_path):
    budget = smallest_budget_of(TASK)
    with batches_of(TASK):
        model = Model(TASK, PagingOptions(device_budget=Budget(nbytes=budget), disk_path=tmp_path))
        model.step(1, Trained())
    overview, counts = Overview.of(chunks(model)), counters(chunks(model))
    assert overview == Overview(
        layers=TASK.modules,
        experts=TASK.modules * TASK.experts,
        pages=PAGES,
        state_bytes=4 * PAGES * PAGE_BYTES,
        device_bytes=budget,
        disk_path=str(tmp_path),
    )
    assert Overview.from_record(overview.record()) == overview
    assert counts is not None
    assert counts["pages_evicted"] > 0
    assert counts["bytes_loaded"] == counts["pages_loaded"] * PAGE_BYTES
    assert f"{counts['pages_loaded']:,} pages came" in in_words(counts)
    model.manager.close()
