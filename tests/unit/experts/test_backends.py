"""Who computes is chosen by device and name, and kernels are refused where they cannot run."""

import pytest
import torch

from megascale_omni.config import ComputeConfig
from megascale_omni.experts import backends
from megascale_omni.experts.backends import backend_for, wants_triton

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_auto_is_torch_on_a_cpu_and_kernels_on_an_accelerator_that_has_triton(monkeypatch):
    assert backend_for(device=CPU, choice="auto").name == "torch"
    assert backend_for(device=CPU, choice="torch").name == "torch"
    for installed in (True, False):
        monkeypatch.setattr(backends, "triton_available", lambda installed=installed: installed)
        assert wants_triton(device=CUDA, choice="auto") is installed
        assert not wants_triton(device=CUDA, choice="torch")


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "triton_available", lambda: True)
    with pytest.raises(ValueError, match=r"compute.backend='triton' on cpu: kernels need an accelerator"):
        backend_for(device=CPU, choice="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert wants_triton(device=CPU, choice="triton")
    assert not wants_triton(device=CPU, choice="auto")


def test_kernels_without_triton_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(backends, "triton_available", lambda: False)
    with pytest.raises(ValueError, match=r"Triton is not installed; pip install 'megascale\[kernels\]'"):
        backend_for(device=CUDA, choice="triton")


def test_an_unknown_backend_is_refused_by_the_configuration():
    with pytest.raises(ValueError, match=r"compute.backend='cuda' is unknown; choose one of auto, torch, triton"):
        ComputeConfig(backend="cuda")  # type: ignore[arg-type]
