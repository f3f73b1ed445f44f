"""Next uses of pages: exact where the future is known, expected times where routers decide."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megascale_omni.paging.forecast import FAR, Visit
from megascale_omni.paging.outlook import Experts, Outlook, expected_use
from megascale_omni.paging.planes import PageNumbering, Plane
from megascale_omni.schedule import Phase
from tests.unit.paging.small import Pages

F, R, B, S, E = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.STEP, Phase.EVAL
WEIGHT, GRADIENT, MOMENT = Plane.WEIGHT, Plane.GRADIENT, Plane.MOMENT1
PLANES = {
    F: (WEIGHT,),
    R: (WEIGHT,),
    E: (WEIGHT,),
    B: (WEIGHT, GRADIENT),
    S: (WEIGHT, GRADIENT, MOMENT),
    Phase.IDLE: (),
}


def mask(*active: int, size: int = 3) -> np.ndarray:
    return np.isin(np.arange(size), active)


def outlook(*steps: Sequence[tuple[Phase, int, tuple[int, ...]]], modules: int = 2, experts: int = 3) -> Outlook:
    """One-page experts; visits as (phase, module, experts); all steps but the last have ended."""
    numbering = PageNumbering()
    for number in range(modules):
        numbering.register(path=f"m{number}", num_experts=experts, num_slices=1)
    found = Outlook(numbering)
    for number, step in enumerate(steps):
        if number:
            found.end_step()
        for phase, module, active in step:
            found.begin(Visit(phase, module, PLANES[phase]), np.array(active, dtype=int))
    return found


def of(found: Outlook, plane: Plane, module: int) -> np.ndarray:
    """Visits from now until the next use."""
    entry = found._numbering.entries[module]
    ids = (entry.first_index + np.arange(entry.num_experts)) * len(Plane) + int(plane)
    return found.next_use(ids) - found.forecast.time


STEP = [
    (F, 0, (0, 1, 2)),
    (F, 1, (0, 1, 2)),
    (B, 1, (0, 1, 2)),
    (B, 0, (0, 1, 2)),
    (S, 0, (0, 1, 2)),
    (S, 1, (0, 1, 2)),
]


def test_where_every_expert_has_tokens_next_uses_are_those_of_a_there_and_back_sweep():
    found = outlook(STEP, STEP[:1])
    parts = np.array([0, 1, 2]) / 3
    found.reached(2)
    assert of(found, WEIGHT, 1) == pytest.approx(1 + parts)
    assert of(found, WEIGHT, 0) == pytest.approx(3 + parts)
    assert of(found, GRADIENT, 0) == pytest.approx(3 + parts)
    assert of(found, MOMENT, 0) == pytest.approx(4 + parts)
    assert of(found, MOMENT, 1) == pytest.approx(5 + parts)


def test_a_backward_needs_the_experts_of_its_forward_and_no_others():
    found = outlook(STEP, [(F, 0, (0,)), (F, 1, (1, 2))])
    found.reached(2)
    use = of(found, WEIGHT, 0)
    assert use[0] == pytest.approx(2)
    assert (use[1:] > 4).all(), "not before the next step"
    use = of(found, WEIGHT, 1)
    assert use[1:] == pytest.approx([1 + 1 / 3, 1 + 2 / 3])
    assert use[0] > 4
    use = of(found, MOMENT, 0)
    assert use[0] == pytest.approx(3)
    assert (use[1:] > 6).all()
    use = of(found, GRADIENT, 0)
    assert use[0] == pytest.approx(2)
    assert (use[1:] >= FAR / 2).all(), "a gradient that is not there has no use"


def test_backwards_come_in_the_order_of_their_forwards():
    two = [(F, 0, (0, 1, 2)), (F, 0, (0, 1, 2)), (B, 0, (0, 1, 2)), (B, 0, (0, 1, 2)), (S, 0, (0, 1, 2))]
    found = outlook(two, [(F, 0, (0,)), (F, 0, (1,))], modules=1)
    found.reached(2)
    assert of(found, WEIGHT, 0)[:2] == pytest.approx([1, 2 + 1 / 3])
    found.begin(Visit(B, 0, PLANES[B]), np.array([0]))
    found.reached(2)
    assert of(found, WEIGHT, 0)[:2] == pytest.approx([2, 1 + 1 / 3])


def test_an_expert_that_is_seldom_needed_is_expected_later():
    experts = Experts.of(3)
    for number in range(400):
        experts.see(F, mask(0, *([1] if number % 4 == 0 else [])))
        experts.see(B, mask())
    experts.end_step()
    coming = [(time, Visit(F, 0, PLANES[F])) for time in range(10, 300, 10)]
    use = expected_use(experts, WEIGHT, coming, length=10, now=0, horizon=40)
    assert use[0] < 11
    assert use[0] < use[1] < use[2]
    assert 20 < use[1] < 80


def test_a_use_that_is_certain_is_expected_when_it_happens_whatever_the_horizon():
    experts = Experts.of(2)
    coming = [(700, Visit(F, 0, PLANES[F]))]
    for horizon in (4.0, 40.0, 4000.0):
        assert expected_use(experts, WEIGHT, coming, length=10, now=3, horizon=horizon).tolist() == [700, 700]


def test_of_two_pages_expected_at_the_same_time_on_average_the_one_that_may_be_used_soon_stays():
    experts = Experts.of(2)
    experts.frequency[:] = (0.5, 1.0)
    coming = [(time, Visit(phase, 0, PLANES[phase])) for time, phase in ((1, F), (2, S), (3, S))]
    soon = expected_use(experts, WEIGHT, [coming[0]], length=4, now=0, horizon=2.0)[0]
    assert 1 < soon < (1 + 5) / 2 + 2, "half of it at 1, half of it a step later"


def test_what_a_router_foresees_counts_more_than_the_past():
    found = outlook([(F, 0, (0,)), (B, 0, (0,))] * 5, [], modules=1)
    found.reached(2)
    assert of(found, WEIGHT, 0).argmin() == 0
    found.foresee(0, mask(2))
    assert of(found, WEIGHT, 0).argmin() == 2
    assert found.probable(0).tolist() == [0.0, 0.0, 1.0]
    found.begin(Visit(F, 0, PLANES[F]), np.array([2]))
    assert found.experts(0).foreseen is None, "it was for that forward"


def test_gradients_have_no_use_after_their_step():
    found = outlook(STEP, STEP)
    found.reached(2)
    assert (of(found, GRADIENT, 0) >= FAR / 2).all()
    assert of(found, WEIGHT, 0) == pytest.approx(1 + np.array([0, 1, 2]) / 3)


def test_recompute_and_backward_are_probable_for_the_experts_of_the_forward():
    again = [(F, 0, (0, 1, 2)), (R, 0, (0, 1, 2)), (B, 0, (0, 1, 2)), (S, 0, (0, 1, 2))]
    found = outlook(again, [(F, 0, (1,))], modules=1)
    assert found.probable(0).tolist() == [0, 1, 0]
    found.begin(Visit(R, 0, PLANES[R]), np.array([1]))
    assert found.probable(0).tolist() == [0, 1, 0]
    found.begin(Visit(B, 0, PLANES[B]), np.array([1]))
    assert found.probable(0).tolist() == [0, 1, 0], "the optimizer"


# -- of pages in a manager ---------------------------------------------------------------------------------------------


def test_within_a_visit_pages_are_used_in_order_and_those_behind_are_needed_at_the_next_visit(tmp_path):
    pages = Pages(tmp_path, experts=4, slots=4)
    outlook = pages.manager.outlook
    everything = np.arange(4)
    for _ in range(2):
        for phase in (F, B):
            outlook.begin(Visit(phase, 0, PLANES[phase]), everything)
        outlook.end_step()
    outlook.begin(Visit(F, 0, PLANES[F]), np.array([0, 1, 2]))
    outlook.reached(1)  # expert 1 is being worked on
    ids = np.array([pages.id(e) for e in range(4)])
    now = outlook.forecast.time
    found = outlook.next_use(ids) - now
    assert found[:3] == pytest.approx([1.0, 1.25, 0.5])
    assert found[3] > 2, "an expert without tokens: not before the next step"


def test_without_a_forecast_the_pages_of_this_visit_that_are_still_to_come_stay(tmp_path):
    pages = Pages(tmp_path, experts=4, slots=4)
    outlook = pages.manager.outlook
    outlook.begin(Visit(E, 0, PLANES[E]), np.arange(4))
    outlook.reached(1)
    found = outlook.next_use(np.array([pages.id(e) for e in range(4)]))
    assert (found[2:] < 1).all()
    assert (found[:2] >= FAR).all()
    assert torch.tensor(found).isfinite().all()
