"""Hot, warm, cold and frozen: the policy, from counts alone."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.config import HeatConfig
from megascale_omni.heat.heatmap import COMPUTE, MEMORY
from megascale_omni.heat.states import Heat, Snapshot, classify, scores, to_freeze, to_probe

CONFIG = HeatConfig()
F, C, W, H = Heat.FROZEN, Heat.COLD, Heat.WARM, Heat.HOT


def snapshot(compute, idle=0, states=W, pending=False) -> Snapshot:
    size = len(compute)
    metrics = np.zeros((size, 3))
    metrics[:, COMPUTE] = metrics[:, MEMORY] = compute
    fill = lambda value, dtype: np.broadcast_to(np.array(value, dtype=dtype), size).copy()  # noqa: E731
    return Snapshot(metrics, fill(idle, np.int64), fill(states, np.int8), fill(pending, bool))


@dataclass(frozen=True)
class Row:
    """A module's experts and the states they get."""

    why: str
    seen: Snapshot
    states: tuple[Heat, ...]
    frozen: tuple[int, ...] = ()


ROWS = [
    Row("balanced experts are all warm", snapshot([5, 5, 5, 5]), (W, W, W, W)),
    Row("even where they have been idle for ever alike", snapshot([5, 5, 5, 5], idle=90), (W, W, W, W)),
    Row("the busiest is hot", snapshot([1, 2, 3, 40]), (W, W, W, H)),
    Row("the least used is cold once it is idle", snapshot([0, 9, 9, 9], idle=[5, 0, 0, 0]), (C, W, W, W), (0,)),
    Row("not before", snapshot([0, 9, 9, 9], idle=[4, 0, 0, 0]), (W, W, W, W)),
    Row("idle but well used is warm", snapshot([8, 9, 9, 7], idle=[9, 0, 0, 0]), (W, W, W, W)),
    Row("all that never had a token", snapshot([0, 0, 0, 9], idle=[9, 9, 9, 0]), (C, C, C, H), (0, 1, 2)),
    Row("what is frozen stays so", snapshot([3, 9, 9, 9], idle=[10, 0, 0, 0], states=[F, W, W, W]), (F, W, W, W)),
    Row("until it gets a token", snapshot([3, 9, 9, 9], idle=[2, 0, 0, 0], states=[F, W, W, W]), (W, W, W, W)),
    Row("not with a gradient to apply", snapshot([0, 9], idle=[9, 0], pending=[True, False]), (C, H)),
    Row("one expert alone", snapshot([5]), (W,)),
    Row("none at all", snapshot([]), ()),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.why)
def test_states(row: Row):
    states = classify(row.seen, CONFIG)
    assert tuple(states.tolist()) == row.states
    assert tuple(to_freeze(row.seen, states, CONFIG).tolist()) == row.frozen
    assert not len(to_freeze(row.seen, states, HeatConfig(freeze=False)))


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_scores_lie_between_0_and_1_and_follow_use(compute):
    found = scores(snapshot(compute).metrics, CONFIG)
    assert ((found >= 0) & (found <= 1 + 1e-9)).all()
    assert found.argmax() in np.flatnonzero(np.array(compute) == max(compute))


def test_weights_decide_what_a_score_is():
    metrics = np.array([[10.0, 0, 0], [0, 10, 0], [0, 0, 10]])
    assert scores(metrics, CONFIG).tolist() == pytest.approx([0.5, 0.3, 0.2])
    only = HeatConfig(compute_weight=0, memory_weight=1, communication_weight=0)
    assert scores(metrics, only).tolist() == [0, 1, 0]


@settings(max_examples=50)
@given(st.integers(1, 60), st.integers(0, 200))
def test_probes_take_turns(frozen, turn):
    states = np.array([F] * frozen + [W] * 3)
    assert not len(to_probe(states, before=1.0, now=1.0, turn=turn, share=0.05)), "the threshold did not rise"
    found = to_probe(states, before=1.0, now=1.5, turn=turn, share=0.05)
    assert len(found) == max(1, int(0.05 * frozen))
    assert (found < frozen).all()
    turns = -(-frozen // len(found))
    seen = {e for t in range(turns) for e in to_probe(states, before=0, now=1, turn=t, share=0.05).tolist()}
    assert seen == set(range(frozen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cold_percentile": 95}, r"cold_percentile=95 is not below hot_percentile=90.*lower the one"),
        ({"alarm_percentile": 40}, r"alarm_percentile=40 is above cold_percentile=30"),
        ({"compute_weight": 0.9}, r"compute_weight 0.9, .* add up to 1.4; they must add up to 1"),
        ({"window_steps": 5}, r"window_steps=5 is shorter than refresh_steps=10"),
        ({"window_steps": 25}, r"window_steps=25 is no multiple of refresh_steps=10, .*; give 20"),
        ({"cold_steps": 0}, r"heat\.cold_steps=0 must be a whole number of steps, 1 or more"),
        ({"probe_share": 2}, r"heat\.probe_share=2 must be between 0 and 1"),
        ({"hot_percentile": "90"}, r"heat\.hot_percentile='90' must be a percentile between 0 and 100"),
        ({"freeze": "yes"}, r"heat\.freeze='yes' must be true or false"),
        ({"alarm_hours": -1}, r"heat\.alarm_hours=-1 must be 0 or more"),
    ],
)
def test_thresholds_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HeatConfig(**options)
