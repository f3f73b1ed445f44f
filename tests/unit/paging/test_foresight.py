"""What a router says ahead: probabilities follow from how often it was right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.foresight import FADING, Foresight, Record
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.residency import probable_experts
from megascale_omni.schedule import Phase
from tests.unit.paging.small import LAYOUT, Pages


def mask(*experts: int, size: int = 6) -> np.ndarray:
    return np.isin(np.arange(size), experts)


def forward(pages: Pages, *experts: int, phase: Phase = Phase.FORWARD) -> None:
    """A visit that needs these experts, seen by manager and observers."""
    visit = Visit(phase, 0, (Plane.WEIGHT,))
    for observer in pages.manager.observers:
        observer.visited(visit, np.array(experts))
    pages.manager.outlook.begin(visit, np.array(experts))


def test_a_router_that_is_always_right_is_believed_and_one_that_is_always_wrong_is_not():
    for right in (True, False):
        record = Record()
        for _ in range(60):
            record.learn(mask(0, 1), mask(0, 1) if right else mask(2, 3))
        found = record.probability(mask(0, 1))
        assert found[:2] == pytest.approx(1.0 if right else 0.0, abs=0.05)
        assert found[2:] == pytest.approx(0.0 if right else 0.5, abs=0.05)
    assert record.counts == {"named": 120, "right": 0, "overlooked": 120}


def test_old_counts_fade():
    record = Record()
    for _ in range(200):
        record.learn(mask(0), mask(1))
    for _ in range(200):
        record.learn(mask(0), mask(0))
    assert record.probability(mask(0))[0] > 0.95
    assert record.named == pytest.approx(1 / (1 - FADING), rel=0.01)


def test_nothing_named_and_everything_named_are_predictions_too():
    record = Record()
    for named in (mask(), mask(*range(6))):
        record.learn(named, mask(0))
        assert np.isfinite(record.probability(named)).all()


def test_a_prediction_is_for_the_next_forward_only(tmp_path):
    pages = Pages(tmp_path, slots=4)
    foresight = Foresight(pages.manager)
    for _ in range(40):
        foresight.predict(0, mask(0, 3))
        outlook = pages.manager.outlook
        assert outlook.experts(0).foreseen is not None
        forward(pages, 0, 3)
        assert outlook.experts(0).foreseen is None
    foresight.predict(0, mask(2))
    assert probable_experts(pages.manager.outlook.probable(0)).tolist() == [2]
    forward(pages, 1, phase=Phase.BACKWARD)
    assert foresight.records[0].counts["named"] == 80, "a backward is no forward"
    forward(pages, 1, phase=Phase.EVAL)
    assert foresight.records[0].counts == {"named": 81, "right": 80, "overlooked": 1}
    forward(pages, 1)
    assert foresight.records[0].counts["named"] == 81, "nobody was asked"


def test_where_every_page_stays_predictions_are_only_counted():
    manager = ExpertManager(device=torch.device("cpu"))
    manager.add_module(path="experts", layout=LAYOUT, num_experts=6, dtypes={Plane.WEIGHT: torch.float32})
    foresight = Foresight(manager)
    foresight.predict(0, mask(1))
    assert manager.outlook.experts(0).foreseen is None
    foresight.visited(Visit(Phase.FORWARD, 0, (Plane.WEIGHT,)), np.array([1]))
    assert foresight.records[0].counts["right"] == 1
