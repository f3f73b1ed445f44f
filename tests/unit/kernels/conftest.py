"""Kernels are imported under Triton's repaired interpreter, and run there, in every test of this folder."""

import pytest

from megascale_omni.kernels.interpreter import interpreted

pytest.importorskip("triton", reason="kernels need Triton (the extra 'kernels')")

with interpreted():  # the first import decides
    import megascale_omni.experts.triton_backend  # noqa: F401


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
