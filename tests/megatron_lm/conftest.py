"""A checkout of Megatron-LM: the one that MEGATRON_LM_PATH names."""

import os
from pathlib import Path

import pytest

from scripts.megatron_lm_runs.running import checkout


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """Path of the checkout; the test is skipped where none is named."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("MEGATRON_LM_PATH names no checkout of Megatron-LM")
    return checkout(Path(path))
