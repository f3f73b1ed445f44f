"""The record of applied steps: order, trimming, and a state that comes back bit for bit."""

import io
import math

import pytest
import torch

from megascale_omni.optimizer.history import History, StepRecord


def record(step: int, **changes: float) -> StepRecord:
    return StepRecord(step, **{"lr": 3e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, **changes})


def filled(last: int, group: int | str = 0) -> History:
    history = History()
    for step in range(1, last + 1):
        history.append(group, record(step, lr=step / 7))
    return history


def test_since_returns_the_missed_steps_in_order():
    history = filled(5)
    assert [r.step for r in history.since(0, 2)] == [3, 4, 5]
    assert history.since(0, 2)[0] == record(3, lr=3 / 7)
    assert history.since(0, 5) == ()
    assert history.last_step(0) == 5


def test_a_group_without_steps_has_missed_none():
    history = History()
    assert history.last_step("dense") == 0
    assert history.since("dense", 0) == ()
    assert history.trim("dense", 0) == 0
    assert history.groups == ()


def test_groups_are_independent_and_an_int_is_not_its_text():
    history = filled(3, group=1)
    history.append("1", record(1))
    assert (history.last_step(1), history.last_step("1")) == (3, 1)
    again = History()
    again.load_state_dict(history.state_dict())
    assert again.groups == (1, "1")


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_step_that_is_not_the_next_one_is_refused(step):
    history = filled(3)
    with pytest.raises(ValueError, match=f"step {step} cannot follow step 3"):
        history.append(0, record(step))
    assert history.last_step(0) == 3


def test_a_resumed_run_starts_at_any_step_and_does_not_invent_the_earlier_ones():
    history = History()
    history.append(0, record(501))
    assert [r.step for r in history.since(0, 500)] == [501]
    with pytest.raises(RuntimeError, match=r"needs steps 500\.\.501"):
        history.since(0, 499)


def test_trimmed_records_are_asked_for_in_vain():
    history = filled(10)
    assert history.trim(0, 4) == 4
    assert history.trim(0, 3) == 0
    assert len(history) == 6
    assert [r.step for r in history.since(0, 4)] == [5, 6, 7, 8, 9, 10]
    with pytest.raises(RuntimeError, match="records up to step 4 are not kept"):
        history.since(0, 3)


def test_trimming_everything_keeps_the_step_number():
    history = filled(10)
    history.trim(0, 10)
    assert (len(history), history.last_step(0)) == (0, 10)
    history.append(0, record(11))
    again = History()
    again.load_state_dict(history.state_dict())
    assert again.since(0, 10) == (record(11),)


def test_steps_of_the_future_are_refused():
    history = filled(2)
    with pytest.raises(RuntimeError, match="claims step 3"):
        history.since(0, 3)
    with pytest.raises(RuntimeError, match="claims step 1"):
        history.since("other", 1)
    with pytest.raises(ValueError, match="cannot trim up to step 3"):
        history.trim(0, 3)


@pytest.mark.parametrize("wrong", [{"beta1": 1.0}, {"beta2": -0.1}, {"beta1": math.nan}])
def test_a_record_that_no_optimizer_could_apply_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .* of step 7"):
        record(7, **wrong)
    with pytest.raises(ValueError, match="numbered from 1"):
        record(0)


def test_state_survives_a_file_without_pickle_bit_for_bit():
    history = filled(3, group="experts")
    odd = [0.1 + 0.2, math.nextafter(1e-8, 1), 5e-324, 1 / 3]
    for step, value in enumerate(odd, 4):
        history.append("experts", record(step, lr=value, eps=value, weight_decay=-value, beta1=value))
    history.trim("experts", 2)
    file = io.BytesIO()
    torch.save(history.state_dict(), file)
    file.seek(0)
    again = History()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.since("experts", 2) == history.since("experts", 2)
    assert again.last_step("experts") == 7


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "version None"),
        ({"version": 2, "groups": {}}, "version 2"),
        ({"version": 1, "groups": {"0": {}}}, "group key '0'"),
        ({"version": 1, "groups": {"int:x": {}}}, "group key 'int:x'"),
        ({"version": 1, "groups": {"int:0": {"values": torch.zeros(1, 5).double()}}}, "int 'base'"),
        ({"version": 1, "groups": {"int:0": {"base": 0, "values": torch.zeros(1, 5)}}}, "float32"),
        ({"version": 1, "groups": {"int:0": {"base": 0, "values": torch.zeros(1, 4).double()}}}, r"\(1, 4\)"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(state, said):
    history = filled(2)
    with pytest.raises(ValueError, match=said):
        history.load_state_dict(state)
    assert history.last_step(0) == 2
