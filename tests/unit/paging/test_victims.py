"""Whoever leaves is who the policy says, though candidates are not put in order at every need."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.victims import Victims
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of, train
from tests.unit.paging.small import Pages, compare_choices

TASK = Task(steps=4, modules=2, experts=8, active=5, rows=16, evaluate=True)


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_training_lets_those_leave_that_the_policy_says(tmp_path, in_backward):
    """With prefetch, several slot classes (biases), evaluations, gradients that come and go: bits stay, too."""
    task = Task(**{**TASK.__dict__, "in_backward": in_backward, "clip": 0.0 if in_backward else 0.5})
    found = Trained()
    with batches_of(task):
        model = Model(task, PagingOptions(device_budget=Budget(fraction=0.4), disk_path=tmp_path))
        numbers = compare_choices(model.manager.pager)
        for number in range(1, task.steps + 1):
            model.step(number, found)
        model.export(found)
        model.manager.close()
    assert sum(numbers) > 100, "there was nothing to choose"
    assert not found.differs_from(train(task, ALL))


def test_changes_that_nobody_asks_after_are_not_kept_for_ever(tmp_path):
    pages = Pages(tmp_path)
    with mock.patch("megascale_omni.paging.pager.MOST_CHANGES", 20):
        numbers = compare_choices(pages.manager.pager)
        for _ in range(30):
            for expert in (3, 4, 5):
                pages.read(expert)
        assert len(pages.manager.pager.victims.changed) <= 20
        pages.check()
    assert sum(numbers) > 3
    pages.manager.close()


def test_nobody_is_chosen_where_nobody_is_asked_for(tmp_path):
    pages = Pages(tmp_path)
    victims: Victims = pages.manager.pager.victims
    assert victims.choose(pages.slot_class, count=0, before=-np.inf) == []
    pages.manager.close()
