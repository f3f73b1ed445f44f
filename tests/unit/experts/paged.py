"""Small paged experts for tests, and what they computed in the form that the reference gives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.backends import Backend
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import BlasProducts, OneDnnProducts, onednn_keeps_fp32
from megascale_omni.experts.workspace import Workspace
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.names import NamingStyle
from megascale_omni.paging.planes import Plane
from tests.unit.experts.reference import Tensors

HIDDEN, FFN = 24, 40
CPU = torch.device("cpu")
SWIGLU = Activation("silu", gated=True)
GELU = Activation("gelu", gated=False)
PRODUCTS = ["blas"] + (["onednn"] if onednn_keeps_fp32() else [])


def small_experts(
    activation: Activation = SWIGLU,
    *,
    num_experts: int = 4,
    rows: int = 16,
    ffn: int = FFN,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    gradient_dtype: torch.dtype | None = None,
    products: str = "blas",
    style: NamingStyle = "sequential",
    manager: ExpertManager | None = None,
    backend: Backend | None = None,
) -> PagedExperts:
    """Experts with random weights in a poisoned arena: 40 neurons in pages of 16, 16 and 8 unless ``rows`` differs."""
    manager = manager or ExpertManager(device=CPU, poison=True)
    workspace = Workspace(CPU)
    experts = PagedExperts(
        manager=manager,
        path=f"module{len(manager.modules)}.experts",
        layout=PageLayout(ExpertShape(hidden=HIDDEN, ffn=ffn, gated=activation.gated, bias=bias), rows),
        num_experts=num_experts,
        dtypes={Plane.WEIGHT: dtype, Plane.GRADIENT: gradient_dtype or dtype},
        activation=activation,
        style=style,
        products=(OneDnnProducts if products == "onednn" else BlasProducts)(workspace),
        workspace=workspace,
        backend=backend,
    )
    weights = {t.name: (torch.randn(t.shape) / t.shape[-1] ** 0.5).to(dtype) for t in experts.names.tensors()}
    for expert in range(num_experts):
        experts.initialise(expert, weights)
    return experts


@dataclass(frozen=True)
class Batch:
    """Tokens, their routing, and the gradient that comes back."""

    counts: tuple[int, ...]
    x: torch.Tensor
    probs: torch.Tensor | None
    grad_y: torch.Tensor


def random_batch(
    counts: Sequence[int], *, probs: bool | torch.dtype = True, dtype: torch.dtype = torch.float32
) -> Batch:
    """``probs``: whether there are any, or their dtype where it is not that of the tokens."""
    n = sum(counts)
    probs_dtype = probs if isinstance(probs, torch.dtype) else dtype
    return Batch(
        counts=tuple(counts),
        x=torch.randn(n, HIDDEN).to(dtype),
        probs=torch.rand(n).to(probs_dtype) if probs else None,
        grad_y=torch.randn(n, HIDDEN).to(dtype),
    )


def leaf(tensor: torch.Tensor | None) -> torch.Tensor:
    """A copy that requires a gradient."""
    assert tensor is not None
    return tensor.detach().clone().requires_grad_()


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient that a leaf has got."""
    assert tensor.grad is not None
    return tensor.grad


def gradients(experts: PagedExperts) -> Tensors:
    """Weight gradients by name; absent pages are zeros, present ones are what their pages hold (poison too)."""
    dtype = experts.pages.dtypes[Plane.GRADIENT]
    tensors = {t.name: torch.zeros(t.shape, dtype=dtype) for t in experts.names.tensors()}
    present = experts.manager.present(experts.pages, Plane.GRADIENT)
    for expert in np.flatnonzero(present.all(axis=1)).tolist():
        with experts.manager.lease(experts.pages, Plane.GRADIENT, [expert]) as lease:
            pages = {(expert, s): lease.page(expert, s) for s in range(experts.layout.num_slices)}
            experts.names.gather(pages, tensors)
    return tensors


def active_experts(experts: PagedExperts) -> list[int]:
    """The experts that have gradient pages; all pages of each."""
    present = experts.manager.present(experts.pages, Plane.GRADIENT)
    assert (present.any(axis=1) == present.all(axis=1)).all()
    return [int(e) for e in np.flatnonzero(present.any(axis=1))]


def drop_gradients(experts: PagedExperts) -> None:
    """What the optimizer does after a step."""
    active = active_experts(experts)
    experts.manager.drop(experts.manager.ids(experts.pages, Plane.GRADIENT, active))


def forward_backward(experts: PagedExperts, batch: Batch) -> Tensors:
    """Output ``y`` and the gradients of ``x`` and ``probs``; weight gradients go to their pages."""
    x = leaf(batch.x)
    probs = None if batch.probs is None else leaf(batch.probs)
    y = experts(x, batch.counts, probs)
    y.backward(batch.grad_y)
    experts.manager.check_integrity()
    assert not experts.manager.table.pins.any()
    result = {"y": y.detach(), "x": grad_of(x)}
    return result if probs is None else result | {"probs": grad_of(probs)}


def paged(experts: PagedExperts, batch: Batch) -> Tensors:
    """The same with the weight gradients, by the names of the reference."""
    return forward_backward(experts, batch) | gradients(experts)
