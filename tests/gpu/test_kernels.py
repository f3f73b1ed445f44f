"""Kernels on an accelerator: what the interpreter cannot say. Values, bits of torch's own kernels, traps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.completion import LastGradients
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import BlasProducts
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.tokens import ComingCounts, rows_of_map
from megascale_omni.experts.workspace import Workspace
from megascale_omni.kernels.interpreter import is_interpreted
from megascale_omni.optimizer.arithmetic import AdamSegment
from megascale_omni.optimizer.cuda_arithmetic import CudaAdamW, fuses_multiply_add
from megascale_omni.optimizer.history import StepRecord
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(is_interpreted(), reason="kernels are interpreted: run scripts/gpu_check.sh")

SWIGLU = Activation("silu", gated=True)
CUDA = torch.device("cuda")


def experts_of(kernels: bool, dtype: torch.dtype, rows: int, *, bias: bool = True) -> PagedExperts:
    from megascale_omni.experts.torch_backend import TorchBackend
    from megascale_omni.kernels.backend import TritonBackend

    workspace = Workspace(CUDA)
    experts = PagedExperts(
        manager=ExpertManager(device=CUDA, poison=True),
        path="experts",
        layout=PageLayout(ExpertShape(hidden=256, ffn=208, gated=True, bias=bias), rows),
        num_experts=4,
        dtypes={Plane.WEIGHT: dtype, Plane.GRADIENT: torch.float32},
        activation=SWIGLU,
        style="sequential",
        products=BlasProducts(workspace),
        workspace=workspace,
        backend=TritonBackend(CUDA, debug=True) if kernels else TorchBackend(),
    )
    torch.manual_seed(1)
    weights = {t.name: (torch.randn(t.shape) / t.shape[-1] ** 0.5).to(CUDA, dtype) for t in experts.names.tensors()}
    for expert in range(4):
        experts.initialise(expert, weights)
    return experts


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [64, 208])
def test_kernels_compute_what_torch_computes(dtype, bound, rows):
    counts, found = (70, 0, 300, 3), []
    for kernels in (False, True):
        experts = experts_of(kernels, dtype, rows)
        torch.manual_seed(2)
        x = torch.randn(sum(counts), 256, device=CUDA).to(dtype).requires_grad_()
        probs = torch.rand(sum(counts), device=CUDA).requires_grad_()
        experts(x, counts, probs).backward(torch.randn(sum(counts), 256, device=CUDA).to(dtype))
        assert x.grad is not None
        assert probs.grad is not None
        found.append({"x": x.grad, "probs": probs.grad, **experts.dense(Plane.GRADIENT)})
    for name, expected in found[0].items():
        error = (found[1][name].float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12)
        assert error <= bound, name


@pytest.mark.parametrize("kernels", [False, True])
def test_pages_are_stepped_in_the_bits_of_torch_on_this_device(kernels):
    p, g = torch.randn(5000, device=CUDA), [torch.randn(5000, device=CUDA) for _ in range(6)]
    dense = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([dense], lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), foreach=True)
    page = {"p": p, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
    for step, gradient in enumerate(g, start=1):
        dense.grad = gradient.clone()
        optimizer.step()
        record = StepRecord(step=step, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
        CudaAdamW(kernels=kernels).step(**page, g=gradient, record=record)
    state = optimizer.state[dense]
    for name, expected in (("p", dense.detach()), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
        assert torch.equal(page[name], expected), name


@pytest.mark.skipif(not fuses_multiply_add(), reason="a processor without fused multiply-add")
def test_host_memory_has_the_bits_of_the_device():
    record = StepRecord(step=3, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    host = {"p": torch.randn(5000), "m": torch.randn(5000), "v": torch.rand(5000)}
    device = {name: tensor.to(CUDA) for name, tensor in host.items()}
    g = torch.randn(5000)
    CudaAdamW(kernels=False).step(**host, g=g, record=record)
    CudaAdamW(kernels=True).step(**device, g=g.to(CUDA), record=record)
    for name, tensor in host.items():
        assert torch.equal(device[name].cpu(), tensor), name


def adam_of(experts: PagedExperts, *, kernels: bool, biases: int | None = 1) -> PagedAdam:
    for plane in (Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2):
        experts.manager.set_plane_dtype(experts.pages, plane, torch.float32)
    groups = [{"lr": 1e-2, "weight_decay": decay, "betas": (0.9, 0.95), "eps": 1e-8} for decay in (0.1, 0.0)]
    return PagedAdam(
        [(experts, GroupBinding(weights=0, biases=biases))],
        groups=groups,
        arithmetic=CudaAdamW(kernels=kernels),
        shards=PageShards(),
        max_lag=2,
    )


def state_of(adam: PagedAdam, experts: PagedExperts) -> list[torch.Tensor]:
    planes = (Plane.WEIGHT, Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2)
    return [tensor for plane in planes for tensor in adam.dense(experts, plane).values()]


def test_all_pages_of_a_module_take_their_steps_in_one_launch_and_in_the_bits_of_torch(monkeypatch):
    from megascale_omni.kernels import paged_adam

    launches: list[int] = []
    plain = paged_adam.launch_adam

    def launched(segments: Sequence[AdamSegment], **options: Any) -> None:
        launches.append(len(segments))
        plain(segments, **options)

    monkeypatch.setattr(paged_adam, "launch_adam", launched)
    found = []
    for kernels in (False, True):
        experts = experts_of(True, torch.bfloat16, 64)
        adam = adam_of(experts, kernels=kernels)
        torch.manual_seed(7)
        for step in range(5):
            active = [step % 3, 3] if step != 2 else []
            experts.manager.create(experts.pages, Plane.GRADIENT, active)
            with experts.manager.lease(experts.pages, Plane.GRADIENT, active) as lease:
                for name in np.ndindex(len(active), experts.layout.num_slices):
                    lease.page(active[name[0]], name[1]).normal_()
            before = len(launches)
            adam.step(clip_coefficient=0.5 if step % 2 else None)
            assert len(launches) - before <= kernels
            ExpertGradients([experts]).drop()
        found.append(state_of(adam, experts))
    assert max(launches) > 2 * experts.layout.num_slices
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [False, True])
def test_a_backward_that_steps_pages_does_not_wait_for_their_gradients(bad):
    experts = experts_of(True, torch.bfloat16, 64)
    adam, gradients = adam_of(experts, kernels=True), ExpertGradients([experts])
    LastGradients(gradients, scale=0.5, backwards=lambda: 1, ends_run=True).stepper = adam
    for step in range(2):  # the first one compiles
        y = experts(torch.randn(40, 256, device=CUDA).bfloat16(), [10, 0, 20, 10], torch.rand(40, device=CUDA))
        grad = torch.randn_like(y)
        grad[15:] *= float("nan") if bad and step else 1.0
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            y.backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gradients.finish(scale=0.5)
        assert (gradients.non_finite is not None) == bool(bad and step)
        assert gradients.stepped
        if gradients.non_finite is None:
            adam.step()
            gradients.drop()
    experts.manager.set_catch_up(experts.pages, None)  # to look at what is there
    assert all(bool(tensor.isfinite().all()) for tensor in experts.dense(Plane.MASTER).values())


ROUTES = [[0, 1], [1, 3], [0, 3], [2], []] * 40
"""Experts of each token."""


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A routing map ``[experts, tokens]``, tokens and the gradient that comes back."""
    map_ET = torch.zeros(4, len(ROUTES), dtype=torch.bool)
    for token, experts in enumerate(ROUTES):
        map_ET[experts, token] = True
    torch.manual_seed(3)
    tokens, grad = (torch.randn(len(ROUTES), 256, device=CUDA).bfloat16() for _ in range(2))
    return map_ET.to(CUDA), tokens, grad


def test_tokens_read_by_index_give_the_bits_of_their_rows_every_time():
    from megascale_omni.kernels.permute_rows import sum_by_token

    map_ET, tokens, grad = routed()
    counts = map_ET.sum(1).tolist()
    _, index = rows_of_map(map_ET, sum(counts))
    found = []
    for by_index in (False, True, True):
        experts = experts_of(True, torch.bfloat16, 64)
        x, probs = tokens.clone().requires_grad_(), torch.linspace(0, 1, sum(counts), device=CUDA).requires_grad_()
        if by_index:
            y = experts(x, counts, probs, index)
            y.backward(grad)
            gx = x.grad
        else:
            rows = x.detach().index_select(0, index).requires_grad_()
            made = experts(rows, counts, probs)
            made.backward(grad.index_select(0, index))
            assert rows.grad is not None
            y, gx = (sum_by_token(t.detach(), index, len(ROUTES)) for t in (made, rows.grad))
        assert gx is not None
        assert probs.grad is not None
        found.append({"y": y.detach(), "x": gx, "probs": probs.grad, **experts.dense(Plane.GRADIENT)})
    for other in found[1:]:
        assert [name for name, tensor in found[0].items() if not tensor.equal(other[name])] == []


def there_and_back(experts: PagedExperts, *, ahead: bool) -> list[torch.Tensor]:
    """Result and gradients of a micro-batch, as the dispatcher of one rank has it computed."""
    map_ET, tokens, grad = routed()
    coming = ComingCounts(map_ET.sum(1))
    counts = coming if ahead else coming.wait()
    expert, index = rows_of_map(map_ET, 2 * len(ROUTES) if isinstance(counts, ComingCounts) else sum(counts))
    x, probs = tokens.clone().requires_grad_(), (expert + 1.0).div(4).requires_grad_()
    y = experts(x, counts, probs, index)
    y.backward(grad)
    assert x.grad is not None
    assert probs.grad is not None
    return [y.detach(), x.grad, probs.grad[: sum(map(len, ROUTES))]]


def test_a_layer_whose_pages_are_there_does_not_wait_and_has_the_bits_of_one_that_does(monkeypatch):
    found = []
    for ahead in (False, True):
        experts = experts_of(True, torch.bfloat16, 64, bias=False)
        assert experts.goes_ahead
        there_and_back(experts, ahead=ahead)  # compiles
        with monkeypatch.context() as patched:
            if ahead:
                patched.setattr(ComingCounts, "wait", lambda self: pytest.fail("the host waits"))
                patched.setattr(ComingCounts, "have_come", False)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if ahead else "default")
            try:
                results = there_and_back(experts, ahead=ahead)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert experts.manager.present(experts.pages, Plane.GRADIENT).all()
        found.append([*results, *experts.dense(Plane.GRADIENT).values()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_pages_that_are_behind_are_caught_up_without_the_host_that_has_not_heard_who_is_read(monkeypatch):
    found = []
    for ahead in (False, True):
        experts = experts_of(True, torch.bfloat16, 64, bias=False)
        adam, gradients = adam_of(experts, kernels=True, biases=None), ExpertGradients([experts])
        ids = experts.manager.ids(experts.pages, Plane.WEIGHT, range(4))
        for active in (range(4), [1]):
            experts.manager.create(experts.pages, Plane.GRADIENT, active)
            with experts.manager.lease(experts.pages, Plane.GRADIENT, active) as lease:
                for expert, slice_ in np.ndindex(4, experts.layout.num_slices):
                    if expert in active:
                        lease.page(expert, slice_).fill_(0.01 * (expert + 1))
            adam.step()
            gradients.drop()
        results = []
        for number in range(2):  # the first one compiles, and catches up
            with monkeypatch.context() as patched:
                if ahead:
                    patched.setattr(ComingCounts, "wait", lambda self: pytest.fail("the host waits"))
                    patched.setattr(ComingCounts, "have_come", False)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if ahead and number else "default")
                try:
                    results += there_and_back(experts, ahead=ahead)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        adam.step()
        gradients.drop()
        found.append([*results, *state_of(adam, experts), torch.tensor(experts.manager.table.last_step[ids])])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


def test_a_layer_with_biases_waits_for_its_counts_alone():
    map_ET, tokens, grad = routed()
    experts = experts_of(True, torch.bfloat16, 64)

    def there_and_back() -> None:
        counts = ComingCounts(map_ET.sum(1)).wait()
        expert, index = rows_of_map(map_ET, sum(counts))
        x = tokens.clone().requires_grad_()
        probs = (expert + 1.0).div(4).requires_grad_()
        experts(x, counts, probs, index).backward(grad)

    there_and_back()  # makes gradient pages, and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        there_and_back()
    finally:
        torch.cuda.set_sync_debug_mode("default")
