"""Every kernel is imported under Triton's repaired interpreter, and runs there in every test of this folder."""

import importlib
import pkgutil

import pytest

import megascale_omni.kernels
from megascale_omni.kernels.interpreter import interpreted

with interpreted():  # the first import decides
    for module in pkgutil.iter_modules(megascale_omni.kernels.__path__):
        importlib.import_module(f"megascale_omni.kernels.{module.name}")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
