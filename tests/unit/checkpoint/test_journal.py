"""The journal proves replays, and outlives a crash in the middle of a line."""

import torch

from megascale_omni.checkpoint.journal import JOURNAL, Journal

LAYOUT = {"data": 1}


def recorded(root, steps, *, loss_of=lambda step: 1.0 / step, layout=LAYOUT) -> Journal:
    journal = Journal(root, layout=layout)
    for step in steps:
        torch.manual_seed(step)
        journal.record(step, loss=loss_of(step), learning_rate=0.1, position=step * 8)
    return journal


def test_equal_replays_are_counted(tmp_path):
    recorded(tmp_path, [1, 2, 3])
    journal = recorded(tmp_path, [2, 3, 4])
    assert (journal.replayed, journal.differing) == (2, [])


def test_a_different_replay_is_named(tmp_path, caplog):
    recorded(tmp_path, [1, 2, 3])
    journal = recorded(tmp_path, [2, 3], loss_of=lambda step: 1.0 / step + (step == 3) * 1e-16)
    assert journal.differing == [3]
    assert "step 3 was made again and is not what it was: loss" in caplog.text


def test_another_layout_need_not_be_equal(tmp_path):
    recorded(tmp_path, [1, 2])
    assert recorded(tmp_path, [2], loss_of=lambda step: 7.0, layout={"data": 2}).replayed == 0


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    recorded(tmp_path, [1, 2])
    path = tmp_path / JOURNAL
    path.write_text(path.read_text()[:-20])
    journal = recorded(tmp_path, [2, 3])
    assert journal.replayed == 0
    again = recorded(tmp_path, [1, 2, 3])
    assert (again.replayed, again.differing) == (3, [])
