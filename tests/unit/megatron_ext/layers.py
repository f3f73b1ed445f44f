"""One MoE layer of stock or of MegaScale with a router that routes as it is told. For functions that ranks run.

Shapes: T tokens of a rank, E experts of the layer, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

HIDDEN, FFN, EXPERTS = 32, 48, 4
LR, WEIGHT_DECAY = 1e-2, 0.1


class ToldRouter(torch.nn.Module):
    """Gives token t to the experts that ``routes[t]`` names, with equal probabilities (a leaf that takes gradients)."""

    def __init__(self) -> None:
        super().__init__()
        self.probs_TE = torch.zeros(0, EXPERTS)
        self.map_TE = torch.zeros(0, EXPERTS, dtype=torch.bool)

    def tell(self, routes: Sequence[Iterable[int]], *, frozen: bool = False) -> None:
        self.map_TE = torch.zeros(len(routes), EXPERTS, dtype=torch.bool)
        for token, experts in enumerate(routes):
            self.map_TE[token, list(experts)] = True
        shares = self.map_TE.sum(1, keepdim=True).clamp(min=1)
        self.probs_TE = (self.map_TE / shares).float().requires_grad_(not frozen)

    def forward(self, hidden: torch.Tensor, padding_mask: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.probs_TE, self.map_TE

    def set_layer_number(self, number: int) -> None:
        pass


@dataclass
class Side:
    """A layer in its data-parallel wrapper with its optimizer and scheduler."""

    ddp: Any
    optimizer: Any
    scheduler: Any
    state: Any

    @property
    def layer(self) -> Any:
        inner = self.ddp.module
        return inner.module.mlp if hasattr(inner, "module") else inner.mlp

    @property
    def router(self) -> ToldRouter:
        router: ToldRouter = self.layer.router
        return router

    def clear(self) -> None:
        """Starts a step."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward(
        self, x_Th: torch.Tensor, routes: Sequence[Iterable[int]], *, frozen_router: bool = False
    ) -> torch.Tensor:
        """Outputs [T, h]."""
        self.router.tell(routes, frozen=frozen_router)
        output: torch.Tensor = self.ddp(x_Th.unsqueeze(1)).squeeze(1)
        return output

    def forward_backward(self, x_Th: torch.Tensor, routes: Sequence[Iterable[int]]) -> tuple[torch.Tensor, ...]:
        """Outputs [T, h], gradients of the tokens [T, h] and of the router's probabilities [T, E]."""
        x_Th = x_Th.detach().clone().requires_grad_()
        output = self.forward(x_Th, routes)
        weighted(output).backward()
        assert x_Th.grad is not None, "the graph does not reach the tokens"
        grad_probs = self.router.probs_TE.grad
        return output.detach(), x_Th.grad, torch.zeros_like(self.router.probs_TE) if grad_probs is None else grad_probs

    def reduce(self) -> None:
        """What follows the last backward."""
        self.ddp.finish_grad_sync()

    def step(self) -> tuple[bool, float | None, float | None]:
        """Optimizer and scheduler."""
        result: tuple[bool, float | None, float | None] = self.optimizer.step()
        self.scheduler.step(increment=1)
        return result

    def train(self, *micro_batches: tuple[torch.Tensor, Sequence[Iterable[int]]]) -> tuple[torch.Tensor, ...]:
        """A whole step; returns what the last micro-batch gave."""
        self.clear()
        given: tuple[torch.Tensor, ...] = ()
        for x_Th, routes in micro_batches:
            given = self.forward_backward(x_Th, routes)
        self.reduce()
        self.step()
        return given

    def experts_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.state.weights().items() if ".experts." in name}

    def experts_gradients(self) -> dict[str, torch.Tensor]:
        """After ``reduce``; zeros for experts without any."""
        return {name: tensor for name, tensor in self.state.gradients().items() if ".experts." in name}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights, masters and moments."""
        state = self.state.state()
        kinds = {"weight": state.weights, "master": state.masters, **state.moments}
        return {f"{kind} {name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def weighted(output_Th: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient differs from element to element."""
    weights = torch.linspace(-1.0, 1.5, max(output_Th.numel(), 2))[: output_Th.numel()]
    return (output_Th.float() * weights.view_as(output_Th)).sum()


def tokens(count: int, *, seed: int) -> torch.Tensor:
    """[T, h], the same for a seed."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def transformer_config(*, ep: int, bias: bool, gated: bool, dtype: torch.dtype, dispatcher: str, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=ep,
        add_bias_linear=bias,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **{
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "moe_router_load_balancing_type": "none",
            "moe_router_topk": 2,
            **more,
        },
    )


def build(
    *,
    megascale: bool,
    ep: int = 1,
    bias: bool = False,
    gated: bool = True,
    bf16: bool = False,
    dispatcher: str = "alltoall",
    distributed: bool = False,
    clip_grad: float = 0.0,
    weight_decay: float = WEIGHT_DECAY,
    check_for_nan: bool = False,
    freeze_experts: bool = False,
    freeze_dense: bool = False,
    page_size: str = "64KiB",
    poison: bool = False,
    overrides: dict[str, float] | None = None,
    stay_enabled: bool = False,
    groups: dict[str, object] | None = None,
    grad_wire: str = "fp32",
    fetch: str = "step",
    routing: str | None = None,
    layer_number: int | None = None,
    **config: Any,
) -> Side:
    """A side from the same seed as every other; parallel state (``fresh_parallel_state``) exists already.

    MegaScale is disabled afterwards unless ``stay_enabled``. ``groups``: options of the groups dispatcher, which is
    then used; ``dispatcher`` is stock's.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.spec_utils import build_module

    import megatron_ext
    from megascale_omni.config import MegaScaleConfig
    from scripts.exactness.state import ModelState
    from tests.integration.megatron_ext.runs import spare_the_collector_what_was_imported

    spare_the_collector_what_was_imported()
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    dtype = torch.bfloat16 if bf16 else torch.float32
    if megascale:
        chosen = MegaScaleConfig().replace("paging", page_size_bytes=page_size)
        chosen = chosen.replace("distributed", grad_wire=grad_wire, fetch=fetch).replace("observe", routing=routing)
        if groups is not None:
            chosen = chosen.replace("distributed", dispatcher="groups", **groups)
        runtime = megatron_ext.enable(chosen)
        runtime.manager.arena.poison = poison
    try:
        settings = transformer_config(ep=ep, bias=bias, gated=gated, dtype=dtype, dispatcher=dispatcher, **config)

        class OneLayer(MegatronModule):
            """The layer, behind dense parameters (enough for every rank of a distributed optimizer)."""

            def __init__(self) -> None:
                super().__init__(settings)
                self.scale = torch.nn.Parameter(torch.ones(HIDDEN, dtype=dtype), requires_grad=not freeze_dense)
                self.shift = torch.nn.Parameter(torch.zeros(32, HIDDEN, dtype=dtype), requires_grad=not freeze_dense)
                spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
                self.mlp = build_module(spec, config=settings)
                self.mlp.router = ToldRouter()
                if layer_number is not None:
                    self.mlp.set_layer_number(layer_number)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = self.mlp(x * self.scale + self.shift.sum(0))[0]
                return output

        model: Any = OneLayer()
        if freeze_experts:
            model.mlp.experts.requires_grad_(False)
        if bf16:
            model = Float16Module(settings, model)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, check_for_nan_in_grad=check_for_nan, grad_reduce_in_fp32=bf16
        )
        ddp = DistributedDataParallel(settings, ddp_config, model)
        optimizer = _optimizer(ddp, bf16, distributed, clip_grad, weight_decay, overrides)
    finally:
        if not stay_enabled:
            megatron_ext.disable()
    state = ModelState([ddp], optimizer, distributed=distributed)
    return Side(ddp, optimizer, _scheduler(optimizer, weight_decay), state)


def _optimizer(
    ddp: Any, bf16: bool, distributed: bool, clip_grad: float, weight_decay: float, overrides: dict[str, float] | None
) -> Any:
    from megatron.core import optimizer
    from megatron.core.optimizer.optimizer_config import ParamKey

    settings = optimizer.OptimizerConfig(
        optimizer="adam",
        lr=LR,
        min_lr=LR / 10,
        weight_decay=weight_decay,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=distributed,
        clip_grad=clip_grad,
        log_num_zeros_in_grad=True,
    )
    standard = optimizer.get_standard_config_overrides(settings)
    if overrides is not None:
        standard[ParamKey(name="*experts*weight")] = overrides
    return optimizer.get_megatron_optimizer(settings, [ddp], config_overrides=standard, use_gloo_process_groups=False)


def _scheduler(optimizer: Any, weight_decay: float) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=LR / 10,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=weight_decay,
        end_wd=2 * weight_decay,
        wd_incr_steps=10,
        wd_incr_style="linear",
    )
