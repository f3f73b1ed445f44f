"""Tests that need an accelerator are skipped, by name and with the reason, where there is none.

With MEGASCALE_GPU_PASSED=FILE tests that are named in the file are left out, and those that pass are added to it: what
a limit of time has cut off goes on where it was (scripts/gpu_check.sh).
"""

import os
from pathlib import Path

import pytest
import torch

_PASSED = os.environ.get("MEGASCALE_GPU_PASSED")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
    if _PASSED and Path(_PASSED).exists():
        passed = set(Path(_PASSED).read_text().splitlines())
        done = [item for item in ours if item.nodeid in passed]
        if done and len(done) < len(ours):  # a file without a test would be an error of pytest's
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _PASSED and report.when == "call" and report.passed:
        with Path(_PASSED).open("a") as file:
            print(report.nodeid, file=file)
