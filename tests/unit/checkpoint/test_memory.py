"""Neither a save beside training nor a load has a second copy of the model in memory."""

import pytest

from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from scripts.measurements import checkpoint_model
from scripts.measurements.checkpoint_model import ExpertsAlone, memory_ratio, peak_of


@pytest.fixture(autouse=True)
def fewer_experts(monkeypatch):
    monkeypatch.setattr(checkpoint_model, "EXPERTS", 10)


def test_a_save_beside_training(tmp_path):
    assert memory_ratio(tmp_path) < 0.25, "a quarter of 120 MiB: copies for 8, a batch that is written, and noise"


def test_a_load(tmp_path):
    model = ExpertsAlone()
    model.step(list(range(10)))
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(model.state, SaveRequest(tag="t", step=1))
    state = model.state

    def load() -> None:
        opened = checkpoints.open()
        assert opened is not None
        checkpoints.load(opened, state)

    load()  # what Python and torch keep from the first time on
    before = peak_of(lambda: None)
    assert peak_of(load) - before < 0.1 * model.nbytes
