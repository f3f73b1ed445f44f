"""The proof against stock with experts computed by interpreted kernels: forward, backward, optimizer step, mutant."""

import pytest

from scripts.measurements.kernels import prove_with_kernels
from scripts.measuring.corpus import standard_library_corpus


def test_a_small_layer_steps_as_stock_does(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("scripts.measurements.kernels.PROVED_STEPS", 2)
    monkeypatch.setattr("scripts.exactness.runner.MUTANT_STEPS", 1)
    verdict = prove_with_kernels(standard_library_corpus(tmp_path, max_bytes=100_000))
    assert verdict.initial_differences == []
    assert verdict.megascale is not None
    assert verdict.worst_share <= 1
    assert verdict.mutant is not None
    assert verdict.mutant.caught
