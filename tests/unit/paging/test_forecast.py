"""What comes: what the last step did is what this one will do, with evaluations in between."""

from megascale_omni.paging import forecast as module
from megascale_omni.paging.forecast import Forecast, Visit
from megascale_omni.paging.planes import Plane
from megascale_omni.schedule import Phase

F, R, B, S, E = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.STEP, Phase.EVAL
THERE_AND_BACK = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0), (S, 0), (S, 1), (S, 2)]
WEIGHT, GRADIENT, MOMENT = Plane.WEIGHT, Plane.GRADIENT, Plane.MOMENT1
PLANES = {
    F: (WEIGHT,),
    R: (WEIGHT,),
    E: (WEIGHT,),
    B: (WEIGHT, GRADIENT),
    S: (WEIGHT, GRADIENT, MOMENT),
    Phase.IDLE: (),
}


def visit(forecast: Forecast, *visits) -> None:
    for phase, number in visits:
        forecast.visit(Visit(phase, number, PLANES[phase]))


def after_a_step(visits=THERE_AND_BACK) -> Forecast:
    forecast = Forecast()
    visit(forecast, *visits)
    forecast.end_step()
    return forecast


def coming(forecast: Forecast, count: int) -> list[tuple[Phase, int]]:
    return [(v.phase, v.module) for v in forecast.following(count)]


def times(forecast: Forecast, number: int) -> list[int]:
    """Visits of a module to come, counted from now."""
    return [time - forecast.time for time, _ in forecast.coming_to(number)]


def test_nothing_is_known_before_the_first_step_has_ended():
    forecast = Forecast()
    visit(forecast, (F, 0))
    assert list(forecast.coming_to(0)) == []
    assert coming(forecast, 3) == []
    assert forecast.length == 0


def test_a_step_is_what_the_last_one_was_and_then_comes_another():
    forecast = after_a_step()
    assert forecast.length == 9
    assert coming(forecast, 18) == THERE_AND_BACK * 2
    assert [times(forecast, m) for m in range(3)] == [
        [1, 6, 7, 10, 15, 16],
        [2, 5, 8, 11, 14, 17],
        [3, 4, 9, 12, 13, 18],
    ]
    visit(forecast, *THERE_AND_BACK[:4])  # in the backward of module 2
    assert coming(forecast, 3) == [(B, 1), (B, 0), (S, 0)]
    assert times(forecast, 2)[:2] == [5, 8]
    visit(forecast, *THERE_AND_BACK[4:])
    assert coming(forecast, 9) == THERE_AND_BACK


def test_steps_that_repeat_are_foretold_without_anything_new():
    forecast = after_a_step()
    generation = forecast.generation
    for _ in range(3):
        visit(forecast, *THERE_AND_BACK)
        forecast.end_step()
    assert forecast.generation == generation


def test_time_never_goes_back_and_what_comes_is_never_in_the_past():
    forecast = after_a_step([(F, 0), (B, 0)])
    for number in range(7):
        visit(forecast, (F, 0))  # a longer step than the last one
        assert forecast.time == 2 + number
        assert all(time > 0 for time in times(forecast, 0))


def test_what_a_step_leaves_out_is_not_waited_for():
    forecast = after_a_step()
    generation = forecast.generation
    visit(forecast, (F, 0), (F, 1), (F, 2), (S, 0))  # nothing goes backwards
    assert forecast.generation > generation
    assert coming(forecast, 2) == [(S, 1), (S, 2)]


def test_what_is_put_in_between_delays_the_rest():
    forecast = after_a_step()
    visit(forecast, (F, 0), (S, 7))
    assert coming(forecast, 2) == [(F, 1), (F, 2)]


def test_exports_change_nothing_but_the_current_visit():
    forecast = after_a_step()
    visit(forecast, (F, 0))
    before = coming(forecast, 9), forecast.time, forecast.generation
    visit(forecast, (Phase.IDLE, 1))
    assert not forecast.uses_now(WEIGHT)
    assert (coming(forecast, 9), forecast.time, forecast.generation) == before


def evaluate(forecast: Forecast, passes: int) -> None:
    for _ in range(passes):
        visit(forecast, (E, 0), (E, 1), (E, 2))


def test_the_first_evaluation_goes_through_the_modules_as_training_does_and_comes_again():
    forecast = after_a_step()
    visit(forecast, *THERE_AND_BACK, (E, 0))
    assert coming(forecast, 6) == [(E, 1), (E, 2), (E, 0), (E, 1), (E, 2), (F, 0)]
    visit(forecast, (E, 1), (E, 2), (E, 0), (E, 1), (E, 2), (E, 0))
    assert coming(forecast, 3) == [(E, 1), (E, 2), (E, 0)], "there was one more than expected, and may be another"


def test_the_next_evaluation_has_as_many_passes_as_the_last_one():
    forecast = after_a_step()
    visit(forecast, *THERE_AND_BACK)
    evaluate(forecast, 3)
    forecast.end_step()
    visit(forecast, *THERE_AND_BACK)
    assert coming(forecast, 9) == THERE_AND_BACK
    visit(forecast, (E, 0))
    assert coming(forecast, 9) == [(E, 1), (E, 2), *[(E, 0), (E, 1), (E, 2)] * 2, (F, 0)]
    visit(forecast, (E, 1), (E, 2))
    evaluate(forecast, 2)
    assert coming(forecast, 9) == THERE_AND_BACK
    forecast.end_step()
    visit(forecast, (F, 0))
    assert coming(forecast, 2) == [(F, 1), (F, 2)]
    assert forecast.length == 9


def test_an_evaluation_in_the_middle_of_a_step_is_followed_by_the_rest_of_it():
    forecast = after_a_step()
    visit(forecast, *THERE_AND_BACK[:3])
    evaluate(forecast, 2)
    visit(forecast, (B, 2))
    assert coming(forecast, 5) == THERE_AND_BACK[4:]


def test_a_visit_uses_the_planes_it_says():
    forecast = Forecast()
    assert not any(forecast.uses_now(plane) for plane in Plane)
    forecast.visit(Visit(F, 0, (MOMENT, WEIGHT)))
    assert {plane for plane in Plane if forecast.uses_now(plane)} == {WEIGHT, MOMENT}


def test_where_nobody_announces_steps_the_record_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_STEP", 10)
    forecast = Forecast()
    for number in range(95):
        visit(forecast, (F, number % 3))
        assert len(forecast.following(1000)) <= 20
    assert forecast.length == 10


def test_a_sweep_over_some_gradients_is_not_taken_for_the_optimizer_of_a_later_step():
    """Of gradients that the last backward has not completed; which modules have some differs from step to step."""
    passes, optimizer = [(F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0)], [(S, 0), (S, 1), (S, 2)]
    forecast = after_a_step([*passes, *optimizer])
    for swept in ((1,), (0, 2), (2,), (), (0, 1, 2), (1,)):
        visit(forecast, *passes)
        for number in swept:
            forecast.visit(Visit(S, number, (Plane.GRADIENT,)))
        visit(forecast, optimizer[0])
        assert coming(forecast, 8) == [*optimizer[1:], *passes], swept
        visit(forecast, *optimizer[1:])
        forecast.end_step()
