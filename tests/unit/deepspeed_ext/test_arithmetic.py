"""The arithmetic that pages are stepped in is that of the optimizer that DeepSpeed made."""

from typing import Any

import pytest
import torch

from deepspeed_ext.stepping import arithmetic_of

CUDA = torch.device("cuda")


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(2))], **settings)  # type: ignore[call-arg]


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_on_cuda_it_is_that_of_the_foreach_kernels(kind: type[torch.optim.Optimizer], kernels: bool) -> None:
    found = arithmetic_of(optimizer(kind, lr=0.1), device=CUDA, kernels=kernels)
    assert type(found).__name__ == f"Cuda{kind.__name__}"
    assert found.kernels == kernels  # type: ignore[attr-defined]


def test_elsewhere_and_without_foreach_it_is_torchs_operations() -> None:
    plain = arithmetic_of(optimizer(torch.optim.AdamW, lr=0.1), device=torch.device("cpu"))
    assert type(arithmetic_of(optimizer(torch.optim.AdamW, lr=0.1, foreach=False), device=CUDA)) is type(plain)
    assert type(arithmetic_of(optimizer(torch.optim.AdamW, lr=0.1, fused=True), device=CUDA)) is not type(plain)
