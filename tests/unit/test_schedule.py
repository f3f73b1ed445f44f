"""The schedule: phases nest, steps ascend, listeners hear every change."""

import pytest

from megascale_omni.schedule import Moment, Phase, Schedule


def test_before_the_first_step_nothing_runs():
    assert Schedule().moment == Moment(step=0, phase=Phase.IDLE, micro_batch=0, chunk=0)


def test_phases_nest_and_the_one_before_comes_back():
    schedule = Schedule()
    schedule.begin_step(1)
    with schedule.enter(Phase.BACKWARD, micro_batch=2, chunk=1) as outer:
        assert schedule.moment == outer == Moment(1, Phase.BACKWARD, 2, 1)
        with schedule.enter(Phase.RECOMPUTE, micro_batch=2, chunk=1):
            assert schedule.moment == Moment(1, Phase.RECOMPUTE, 2, 1)
        assert schedule.moment == outer
    assert schedule.moment == Moment(step=1)


def test_an_error_inside_a_phase_ends_the_phase():
    schedule = Schedule()
    with pytest.raises(KeyError):
        with schedule.enter(Phase.FORWARD):
            raise KeyError
    assert schedule.moment.phase is Phase.IDLE


def test_steps_ascend_and_may_leave_some_out():
    schedule = Schedule()
    for step in (1, 2, 5):
        schedule.begin_step(step)
        assert schedule.moment == Moment(step=step)
    for step in (5, 4, 0):
        with pytest.raises(RuntimeError, match=f"step {step} is announced after step 5"):
            schedule.begin_step(step)


def test_a_resumed_run_goes_on_after_the_steps_it_has_done():
    schedule = Schedule()
    schedule.begin_step(9)
    schedule.resume_at(4)  # an older checkpoint was loaded
    with pytest.raises(RuntimeError, match="step 4 is announced after step 4"):
        schedule.begin_step(4)
    schedule.begin_step(5)
    assert schedule.moment.step == 5


def test_a_phase_that_spans_the_start_of_a_step_keeps_the_new_step():
    schedule = Schedule()
    schedule.begin_step(1)
    with schedule.enter(Phase.EVAL):
        schedule.begin_step(2)
    assert schedule.moment == Moment(step=2)


def test_listeners_hear_every_change_in_order():
    schedule = Schedule()
    heard: list[Moment] = []
    schedule.listen(heard.append)
    schedule.begin_step(1)
    with schedule.enter(Phase.FORWARD, micro_batch=3):
        pass
    schedule.resume_at(7)
    assert heard == [Moment(1), Moment(1, Phase.FORWARD, 3), Moment(1), Moment(7)]
