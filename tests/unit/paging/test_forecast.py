"""Next uses: what the last step did is what this one will do; what is no training step changes nothing of that."""

import numpy as np
import pytest
import torch

from megascale_omni.paging import forecast as module
from megascale_omni.paging.forecast import FAR, Forecast, Visit
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase
from tests.unit.paging.small import Pages

F, R, B, S, E = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.STEP, Phase.EVAL
THERE_AND_BACK = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0), (S, 0), (S, 1), (S, 2)]
WEIGHT, GRADIENT, MOMENT = Plane.WEIGHT, Plane.GRADIENT, Plane.MOMENT1
PLANES = {F: (WEIGHT,), R: (WEIGHT,), E: (WEIGHT,), B: (WEIGHT, GRADIENT), S: (WEIGHT, GRADIENT, MOMENT)}


def visit(phase: Phase, number: int) -> Visit:
    return Visit(phase, number, PLANES.get(phase, ()))


def after_a_step(visits=THERE_AND_BACK) -> Forecast:
    forecast = Forecast()
    for phase, number in visits:
        forecast.visit(visit(phase, number))
    forecast.end_step()
    return forecast


def next_of(forecast: Forecast, plane: Plane, number: int) -> float:
    return forecast.next_visit(plane, number, after=forecast.position)


def test_nothing_is_known_before_the_first_step_has_ended():
    forecast = Forecast()
    forecast.visit(visit(F, 0))
    assert next_of(forecast, WEIGHT, 0) == FAR
    assert forecast.following(3) == []
    assert (forecast.position, forecast.length) == (0, 0)


def test_there_and_back():
    forecast = after_a_step()
    assert (forecast.position, forecast.length) == (-1, 9)
    assert [next_of(forecast, WEIGHT, m) for m in range(3)] == [0, 1, 2]
    assert [next_of(forecast, GRADIENT, m) for m in range(3)] == [5, 4, 3]
    assert [next_of(forecast, MOMENT, m) for m in range(3)] == [6, 7, 8]
    for phase, number in THERE_AND_BACK[:4]:
        forecast.visit(visit(phase, number))  # in the backward of module 2
    assert [next_of(forecast, WEIGHT, m) for m in range(3)] == [5, 4, 8]
    assert [next_of(forecast, GRADIENT, m) for m in range(3)] == [5, 4, 8]
    assert forecast.following(3) == [visit(B, 1), visit(B, 0), visit(S, 0)]


def test_after_its_last_use_a_page_is_needed_in_the_next_step():
    forecast = after_a_step()
    for phase, number in THERE_AND_BACK:
        forecast.visit(visit(phase, number))
    assert [next_of(forecast, WEIGHT, m) for m in range(3)] == [9, 10, 11]
    assert [next_of(forecast, GRADIENT, m) for m in range(3)] == [14, 13, 12]
    assert forecast.following(2) == [visit(F, 0), visit(F, 1)]


def test_steps_that_repeat_say_the_same_every_time():
    forecast = after_a_step()
    seen = []
    for _ in range(3):
        found = []
        for phase, number in THERE_AND_BACK:
            forecast.visit(visit(phase, number))
            found.append([next_of(forecast, p, m) for p in (WEIGHT, GRADIENT, MOMENT) for m in range(3)])
        forecast.end_step()
        seen.append(found)
    assert seen[0] == seen[1] == seen[2]


def test_recompute_uses_weights_and_micro_batches_come_again():
    visits = [(F, 0), (F, 1), (F, 0), (F, 1), (R, 1), (B, 1), (R, 0), (B, 0), (S, 0), (S, 1)]
    forecast = after_a_step(visits)
    forecast.visit(visit(F, 0))
    assert next_of(forecast, WEIGHT, 0) == 2
    for phase, number in visits[1:4]:
        forecast.visit(visit(phase, number))
    assert next_of(forecast, WEIGHT, 1) == 4
    assert next_of(forecast, GRADIENT, 1) == 5


def test_an_evaluation_in_between_changes_nothing_but_the_current_visit():
    forecast = after_a_step()
    forecast.visit(visit(F, 0))
    before = [next_of(forecast, WEIGHT, m) for m in range(3)]
    for number in range(3):
        forecast.visit(visit(E, number))
        assert forecast.uses_now(WEIGHT)
        assert not forecast.uses_now(GRADIENT)
    forecast.visit(visit(Phase.IDLE, 1))
    assert not forecast.uses_now(WEIGHT)
    assert [next_of(forecast, WEIGHT, m) for m in range(3)] == before
    assert forecast.position == 0
    for phase, number in THERE_AND_BACK[1:]:
        forecast.visit(visit(phase, number))
    forecast.end_step()
    assert forecast.length == 9


@pytest.mark.parametrize("phase", Phase)
def test_a_visit_uses_the_planes_it_says(phase):
    forecast = Forecast()
    assert not any(forecast.uses_now(plane) for plane in Plane)
    forecast.visit(Visit(phase, 0, (GRADIENT, MOMENT)))
    assert {plane for plane in Plane if forecast.uses_now(plane)} == {GRADIENT, MOMENT}


def test_two_sweeps_of_a_step_use_different_planes():
    """Gradients are scaled in one and applied in another; moments are not needed for the first."""
    forecast = after_a_step()
    for planes in ((GRADIENT,), (WEIGHT, GRADIENT, MOMENT)):
        forecast.visit(Visit(S, 0, planes))
    forecast.end_step()
    assert [next_of(forecast, plane, 0) for plane in (GRADIENT, MOMENT)] == [0, 1]


def test_a_step_that_turns_out_longer_never_finds_its_next_use_in_the_past():
    forecast = after_a_step([(F, 0), (B, 0)])
    for _ in range(7):
        forecast.visit(visit(F, 0))
        assert next_of(forecast, WEIGHT, 0) == forecast.position + 1
        assert next_of(forecast, GRADIENT, 0) >= forecast.position


def test_a_plane_that_no_phase_used_is_far_away():
    forecast = after_a_step([(F, 0)])
    assert next_of(forecast, GRADIENT, 0) == FAR
    assert next_of(forecast, WEIGHT, 5) == FAR


def test_where_nobody_announces_steps_the_record_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_STEP", 10)
    forecast = Forecast()
    for number in range(95):
        forecast.visit(visit(F, number % 3))
        assert forecast.position < 10
    assert forecast.length == 10


# -- of pages ----------------------------------------------------------------------------------------------------------


def test_within_a_visit_pages_are_used_in_order_and_those_behind_are_needed_at_the_next_visit(tmp_path):
    pages = Pages(tmp_path, experts=4, slots=4)
    forecast, pager = pages.manager.forecast, pages.manager.pager
    for _ in range(2):
        for phase in (F, B):
            forecast.visit(visit(phase, 0))
        forecast.end_step()
    ids = np.array([pages.id(e) for e in range(4)])
    assert pager.next_use(ids).tolist() == [0.0, 0.25, 0.5, 0.75]
    forecast.visit(visit(F, 0))
    pager.cursor = (0, 0.25)  # expert 1 is being worked on
    assert pager.next_use(ids).tolist() == [1.0, 1.25, 0.5, 0.75]
    pages.manager.table.active[ids[2]] = False  # an expert without tokens: probably not before the next step
    assert pager.next_use(ids).tolist() == [1.0, 1.25, 2.5, 0.75]


def test_without_a_forecast_the_pages_of_this_visit_that_are_still_to_come_stay(tmp_path):
    pages = Pages(tmp_path, experts=4, slots=4)
    pages.manager.forecast.visit(visit(E, 0))
    pages.manager.pager.cursor = (0, 0.25)
    found = pages.manager.pager.next_use(np.array([pages.id(e) for e in range(4)]))
    assert (found[2:] < 1).all()
    assert (found[:2] >= FAR).all()
    assert torch.tensor(found).isfinite().all()
