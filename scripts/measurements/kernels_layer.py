"""A layer of experts trained on an accelerator, against torch's products and against stock: rows K9 of `kernels`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch

from megascale_omni.experts.activation import Activation
from megascale_omni.experts.backends import Backend
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.products import BlasProducts
from megascale_omni.experts.shards import PageShards
from megascale_omni.experts.torch_backend import TorchBackend
from megascale_omni.experts.workspace import Workspace
from megascale_omni.kernels.backend import TritonBackend
from megascale_omni.optimizer.arithmetic import arithmetic_for
from megascale_omni.optimizer.paged_adam import GroupBinding, PagedAdam
from megascale_omni.optimizer.rates import settle_for
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.planes import Plane
from scripts.measurements.kernels_device import EXPERTS, HIDDEN, NEURONS, PAGE_BYTES, seconds_of

TOKENS = 1024
"""Of each expert."""
SETTINGS = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
_DTYPE = torch.bfloat16
_SWIGLU = Activation("silu", gated=True)
_SHAPE = ExpertShape(hidden=HIDDEN, ffn=NEURONS, gated=True, bias=False)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class PagedLayer:
    """Paged experts, and where asked for their optimizer."""

    def __init__(self, backend: Backend, *, options: PagingOptions | None = None, steps: bool = False) -> None:
        device = _device()
        workspace, self.manager = Workspace(device), ExpertManager(device=device, options=options)
        dtypes = {Plane.WEIGHT: _DTYPE, Plane.GRADIENT: torch.float32}
        if steps:
            dtypes |= dict.fromkeys((Plane.MASTER, Plane.MOMENT1, Plane.MOMENT2), torch.float32)
        self.experts = PagedExperts(
            manager=self.manager,
            path="experts",
            layout=PageLayout.for_page_bytes(_SHAPE, page_bytes=PAGE_BYTES, dtype=_DTYPE),
            num_experts=EXPERTS,
            dtypes=dtypes,
            activation=_SWIGLU,
            style="sequential",
            products=BlasProducts(workspace),
            workspace=workspace,
            backend=backend,
        )
        for expert in range(EXPERTS):
            parts = self.experts.names.of_expert(expert)
            shapes = {part.tensor.name: part.tensor.shape for part in parts}
            made = {name: (torch.randn(s) / s[-1] ** 0.5).to(device, _DTYPE) for name, s in shapes.items()}
            self.experts.initialise(expert, made)
        self.gradients = ExpertGradients([self.experts])
        self.adam = self._adam() if steps else None
        self.x, self.probs, self.grad = _inputs(device)

    def _adam(self) -> PagedAdam:
        arithmetic = arithmetic_for(decoupled=True, fused=False, device=_device(), kernels=True)
        settled = settle_for("auto", modules=[self.experts], arithmetic=arithmetic)
        return PagedAdam(
            [(self.experts, GroupBinding(weights=0, biases=None))],
            groups=[dict(SETTINGS)],
            arithmetic=arithmetic,
            shards=PageShards(),
            in_host=settled.in_host,
        )

    def there_and_back(self) -> None:
        """Forward and backward."""
        self.experts(self.x, [TOKENS] * EXPERTS, self.probs).backward(self.grad)
        self.x.grad = None

    def step(self) -> None:
        """A whole step."""
        assert self.adam is not None
        self.gradients.drop()
        self.there_and_back()
        self.gradients.finish(scale=1.0)
        self.adam.step()


def _inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = TOKENS * EXPERTS
    x = torch.randn(rows, HIDDEN, dtype=_DTYPE, device=device, requires_grad=True)
    return x, torch.rand(rows, device=device), torch.randn(rows, HIDDEN, dtype=_DTYPE, device=device)


class StockLayer:
    """The best experts class of stock that can be built here, stepped by torch's AdamW on fp32 masters."""

    def __init__(self) -> None:
        device = _device()
        self.experts, self.name = stock_experts(device)
        self.params = [p for p in self.experts.parameters() if p.requires_grad]
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.params]
        self.adam = torch.optim.AdamW(self.masters, **SETTINGS)  # type: ignore[arg-type]
        self.x, self.probs, self.grad = _inputs(device)
        self.counts = torch.full((EXPERTS,), TOKENS, dtype=torch.int64)

    def step(self) -> None:
        """A whole step, with gradients in fp32 as a run of Megatron has them."""
        y, _ = self.experts(self.x, self.counts, self.probs)
        y.backward(self.grad)
        for master, parameter in zip(self.masters, self.params, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.adam.step()
        with torch.no_grad():
            for parameter, master in zip(self.params, self.masters, strict=True):
                parameter.copy_(master)
        self.x.grad = None


def stock_experts(device: torch.device) -> tuple[torch.nn.Module, str]:
    """Stock's experts: Transformer Engine's grouped products where it is there, one module an expert otherwise.

    Raises:
        ImportError: megatron-core is not installed.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=32, ffn_hidden_size=NEURONS, moe_ffn_hidden_size=NEURONS,
        num_moe_experts=EXPERTS, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, bf16=True, params_dtype=_DTYPE, moe_grouped_gemm=True,
    )  # fmt: skip
    tried = []
    for te, grouped in ((True, True), (False, False)):
        try:
            spec = get_moe_module_spec(use_te=te, num_experts=EXPERTS, moe_grouped_gemm=grouped)
            groups = get_default_pg_collection()
            module = build_module(spec.submodules.experts, EXPERTS, config, pg_collection=groups)
            return module.to(device), type(module).__name__
        except (ImportError, AssertionError, ValueError) as error:
            tried.append(f"{'grouped' if grouped else 'sequential'}: {error}")
    raise RuntimeError(f"stock has no experts class that can be built here: {'; '.join(tried)}")


def layer_ratio() -> float:
    """K9-speed: a layer's forward and backward with kernels, against the same pages with torch's products."""
    backends: Sequence[Backend] = (TorchBackend(), TritonBackend(_device()))
    torch_seconds, kernel_seconds = (seconds_of(PagedLayer(backend).there_and_back) for backend in backends)
    return torch_seconds / kernel_seconds


def step_ratio() -> float:
    """K9-step: seconds of a step of stock's experts, against ours with every page resident."""
    theirs = seconds_of(StockLayer().step)
    torch.cuda.empty_cache()
    return theirs / seconds_of(PagedLayer(TritonBackend(_device()), steps=True).step)


def memory_ratio() -> float:
    """K9-memory: peak device bytes of a step of stock's experts, against ours with a quarter of all pages resident."""
    theirs = _peak(lambda: StockLayer().step)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # on a disk, as pages demand

        def paged() -> Callable[[], None]:
            options = PagingOptions(Budget(fraction=0.25), Budget(fraction=1.0), folder)
            return PagedLayer(TritonBackend(_device()), options=options, steps=True).step

        return theirs / _peak(paged)


def _peak(make: Callable[[], Callable[[], None]]) -> float:
    """Device bytes of three steps, of what ``make`` makes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, step = torch.cuda.memory_allocated(), make()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)
