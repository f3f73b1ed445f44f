"""Stock's optimizer for dense parameters and PagedAdam for experts, seen by stock as one chained optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer

from megascale_omni.clipping import ClipConfig
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import AdamArithmetic, arithmetic_for
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.optimizer.rates import settle_for
from megascale_omni.paging.planes import Plane
from megatron_ext import optimizer_groups, patches, support
from megatron_ext.clipping import ModuleClipping, SkippingClipping
from megatron_ext.distributed import MegaScaleDDP, innermost
from megatron_ext.experts import SOURCE, MegaScaleExperts
from megatron_ext.gradient_norm import Listed, NormParts, gradients_for_norm, norm_of
from megatron_ext.optimizer_state import GroupPlaces, OptimizerState
from megatron_ext.runtime import Runtime

CLIP_STATE = "megascale_clip"
"""Key of the clipper's state in a checkpoint."""


class PagedOptimizer(MegatronOptimizer):
    """The experts' member of the chain. It has parameter groups (for the scheduler) but no parameters."""

    is_stub_optimizer = False

    def __init__(
        self,
        adam: PagedAdam,
        config: OptimizerConfig,
        gradients: Sequence[ExpertGradients],
        stats_group: dist.ProcessGroup,
        listed: Sequence[Listed],
    ) -> None:
        super().__init__(adam, config)  # type: ignore[arg-type]
        self.adam = adam
        self.gradients = tuple(gradients)
        for chunk in self.gradients:
            chunk.counts_zeros = bool(config.log_num_zeros_in_grad)
        self.grad_stats_parallel_group = stats_group
        self.clip_coefficient: float | dict[PagedExperts, float] | None = None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.device = device
        self.norm_parts: NormParts | None = None
        if config.bf16 and device.type == "cpu":  # see [Note: the last bit of the norm]
            self.norm_parts = NormParts(self.gradients, adam.shards, listed, device)
            for chunk in self.gradients:
                chunk.by_tensor = True

    def _get_param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups

    def _set_param_groups(self, value: list[dict[str, Any]]) -> None:
        self.adam.param_groups = value

    param_groups = property(_get_param_groups, _set_param_groups)
    state = property(lambda self: {})

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """None: pages are not parameters."""
        return []

    def prepare_grads(self) -> bool:
        """Nothing to do: gradients are in pages already. Never reports an overflow (fp16 is refused)."""
        return False

    def squared_norm(self) -> float:
        """Sum of squares of the experts' gradients over the ranks of the stats group. A collective."""
        return self._sum(sum(gradients.squares(self.adam.shards) for gradients in self.gradients))

    def count_zeros(self) -> float:
        """Zero gradient elements of the experts, untouched experts included. A collective."""
        return self._sum(sum(gradients.zeros(self.adam.shards) for gradients in self.gradients))

    def _sum(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.grad_stats_parallel_group)
        return float(total.item())

    def get_grad_norm(self) -> float:
        """Norm of the experts' gradients. A collective."""
        if self.norm_parts is None:
            return math.sqrt(self.squared_norm())
        return norm_of(self.norm_parts.of_experts(), self.grad_stats_parallel_group)

    def get_main_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """What stands for the experts' gradients where stock adds up norms; they are in no group of their own."""
        assert self.norm_parts is not None
        return self.norm_parts.of_experts() if grad_norm_group is None else []

    get_grads_for_grad_norm = get_main_grads_for_grad_norm

    def step_with_ready_grads(self) -> bool:
        """Steps every page; multiplies gradients by ``clip_coefficient`` first."""
        self.adam.step(clip_coefficient=self.clip_coefficient)
        self.clip_coefficient = None
        return True

    def step(self) -> tuple[bool, float, float]:
        """Not used: the chain steps its members."""
        raise RuntimeError("PagedOptimizer is stepped by MegaScaleChainedOptimizer only")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradient pages are dropped by MegaScaleDDP.zero_grad_buffer, as stock's buffers are zeroed."""

    def get_loss_scale(self) -> torch.Tensor:
        """One: bf16 and fp32 need no loss scaling."""
        return torch.ones(1, dtype=torch.float32, device=self.device)

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Masters are copied from the weights anew."""
        self.adam.refresh_masters()

    def state_dict(self) -> dict[str, Any]:
        """See MegaScaleChainedOptimizer."""
        raise RuntimeError("the state of paged experts is read through MegaScaleChainedOptimizer.sharded_state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See MegaScaleChainedOptimizer."""
        raise RuntimeError("the state of paged experts is loaded through MegaScaleChainedOptimizer.load_state_dict")

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - stock's signature
        """See MegaScaleChainedOptimizer."""
        raise RuntimeError("the state of paged experts is read through MegaScaleChainedOptimizer.sharded_state_dict")

    def offload_to_cpu(self) -> None:
        """Refused: ValueError."""
        raise ValueError("offloading the optimizer between phases is not supported with --megascale")

    def restore_from_cpu(self) -> None:
        """Refused: ValueError."""
        raise ValueError("offloading the optimizer between phases is not supported with --megascale")


class MegaScaleChainedOptimizer(ChainedOptimizer):
    """Stock's chain of dense optimizers, followed by the experts' pages.

    Norm, clipping and zero count are over both; the state dict has the form that stock would have written at this
    expert parallel size (see :mod:`megatron_ext.optimizer_state`).
    """

    def __init__(
        self,
        dense: ChainedOptimizer,
        paged: PagedOptimizer,
        *,
        expert_parallel: bool,
        places: GroupPlaces,
        clipping: ModuleClipping | SkippingClipping | None = None,
    ) -> None:
        super().__init__([*dense.chained_optimizers, paged])
        self.dense = dense
        self.paged = paged
        self.clipping = clipping
        self.before_step: Callable[[], None] = lambda: None
        self._expert_parallel = expert_parallel
        self._state = OptimizerState(dense=dense, adam=paged.adam, expert_parallel=expert_parallel, places=places)

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Norm over dense parameters and experts, as stock's: each gradient counted once. A collective."""
        norm = self._norm_of_all()
        clip_grad = self.config.clip_grad
        # Stock's coefficient (clip_grads.py), and its behaviour under NaN: not smaller than one, hence no clipping.
        coefficient = clip_grad / (norm + 1.0e-6) if clip_grad > 0.0 else 1.0
        self.paged.clip_coefficient = coefficient if coefficient < 1.0 else None
        return norm

    def _norm_of_all(self) -> float:
        parts = self.paged.norm_parts
        if parts is None:
            dense, experts = self.dense.get_grad_norm() or 0.0, self.paged.squared_norm()
            return math.sqrt(float(dense) ** 2 + experts)
        if self._expert_parallel:
            return float(super().get_grad_norm())
        found: list[torch.Tensor] = []  # stock has one optimizer here, and one list
        for member in self.dense.chained_optimizers:
            found += gradients_for_norm(member)
        return norm_of(parts.beside(found), self.paged.grad_stats_parallel_group)

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """As stock; where it is asked for, clips by module, or leaves out a step whose gradients are not finite."""
        try:
            return self._clip_and_step()
        finally:
            for schedule in {experts.manager.schedule for experts in self.paged.adam.modules}:
                schedule.end_step()

    def _clip_and_step(self) -> tuple[bool, float | None, float | None]:
        if self.clipping is None:
            result: tuple[bool, float | None, float | None] = super().step()
            return result
        norm = None if self.prepare_grads() else self.clipping.clip(self.get_grad_norm)
        if norm is None:
            return False, None, None
        self.paged.clip_coefficient = self.clipping.of_experts()
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Zeros over dense parameters and experts. A collective."""
        return float(self.dense.count_zeros()) + self.paged.count_zeros()

    def step_with_ready_grads(self) -> bool:
        """As stock; a save that goes on beside training is told before anything changes."""
        self.before_step()
        return bool(super().step_with_ready_grads())

    def _synchronize_steps(self) -> None:
        """Torch's optimizers count steps by parameter, PagedAdam by itself: there is nothing to align."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Refused, with the two methods below: stock's unsharded format.

        Raises:
            ValueError: names the format that works.
        """
        raise ValueError(
            "--ckpt-format torch is not supported with --megascale; use torch_dist, which loads in stock too"
        )

    def save_parameter_state(self, filename: str) -> None:
        """Refused as :meth:`state_dict`: stock would leave the experts out."""
        self.state_dict()

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refused as :meth:`state_dict`: stock would leave the experts out."""
        self.state_dict()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        **kwargs: Any,  # noqa: ANN401 - stock's signature
    ) -> dict[Any, Any]:
        """Stock's sharded optimizer state, experts included. A collective where state is sharded."""
        state = self._state.sharded(model_sharded_state_dict, is_loading=is_loading, **kwargs)
        if self.clipping is not None and not is_loading:
            _inner_state(state)[CLIP_STATE] = self.clipping.state_dict()
        return state

    def described_state(self) -> dict[str, Any]:
        """The part of :meth:`sharded_state_dict` that is no tensor."""
        return self._state.described()

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        """Loads what :meth:`sharded_state_dict` described."""
        parts = [part for part in (state_dict, state_dict.get(0), state_dict.get(1)) if isinstance(part, dict)]
        found = [part.pop(CLIP_STATE) for part in parts if CLIP_STATE in part]
        clip = found[0] if found else None
        self._state.load(state_dict)
        if self.clipping is not None and clip is not None:
            self.clipping.load_state_dict(clip)


def _inner_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """The dict of an optimizer's state that may have one more entry, which stock does not look at."""
    inner: dict[Any, Any] = state if not {0, 1} & state.keys() else state[1]
    return inner


def build_optimizer(
    stock: Callable[..., ChainedOptimizer],
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: dict[Any, Any] | None = None,
    **options: Any,  # noqa: ANN401 - stock's signature
) -> ChainedOptimizer:
    """Stock's ``get_megatron_optimizer`` for chunks that hold paged experts.

    Raises:
        ValueError: an unsupported optimizer option, no paged experts in the whole model (on every rank), MoE layers
            that were built before MegaScale was enabled, or paged experts and a chunk without stock's data-parallel
            wrapper.
    """
    chunks = [chunk for chunk in model_chunks if isinstance(chunk, MegaScaleDDP)]
    if len(chunks) < len(model_chunks):
        _refuse_late(model_chunks)
        _refuse_experts(model_chunks)
        return stock(config, model_chunks, config_overrides, **options)
    support.check("optimizer", config)
    _refuse_late(model_chunks)
    clip = patches.active_runtime().config.clip
    if not clip.skips_nonfinite:
        _refuse_dense_model(chunks)
    if config_overrides is None:  # where stock fills in its defaults differs between releases
        config_overrides = get_standard_config_overrides(config)
    dense = stock(config, model_chunks, config_overrides, **options)
    expert_parallel = chunks[0].config.expert_model_parallel_size > 1
    listed = optimizer_groups.listed_groups(config, chunks, config_overrides, expert_parallel=expert_parallel)
    places = optimizer_groups.places(listed, dense, expert_parallel=expert_parallel)
    adam = _paged_adam(config, chunks, [listed[place] for place in places.paged], dense)
    in_order = [getattr(p, SOURCE, None) for group in listed for p in group["params"]]
    stats_group = _stats_group(dense, expert_parallel)
    paged = PagedOptimizer(adam, config, [chunk.gradients for chunk in chunks], stats_group, in_order)
    clipping = _clipping(clip, chunks, dense, paged)
    chained = MegaScaleChainedOptimizer(dense, paged, expert_parallel=expert_parallel, places=places, clipping=clipping)
    adam.before_step = lambda: chained.before_step()
    if config.clip_grad <= 0.0 and clipping is None and adam.shards.size == 1:
        for chunk in chunks:
            if chunk.last_gradients is not None and not chunk.config.calculate_per_token_loss:
                chunk.last_gradients.stepper = adam
    patches.active_runtime().announce(chunks)
    return chained


def _paged_adam(
    config: OptimizerConfig, chunks: Sequence[MegaScaleDDP], groups: list[dict[str, Any]], dense: ChainedOptimizer
) -> PagedAdam:
    """The optimizer of the chunks' pages, which get the planes that it needs. A collective.

    Raises:
        ValueError: the device budget does not hold these planes; an arithmetic that there is not; options at odds.
    """
    bindings = optimizer_groups.bindings(groups, chunks)
    shards = PageShards()
    if config.use_distributed_optimizer:
        group: dist.ProcessGroup = chunks[0].intra_expt_dp_group
        shards = PageShards(rank=group.rank(), size=group.size(), group=group)
    for experts in bindings:
        manager, pages = experts.manager, experts.pages
        if pages.dtypes[Plane.WEIGHT] is not torch.float32:
            manager.set_plane_dtype(pages, Plane.MASTER, torch.float32)
        manager.set_plane_dtype(pages, Plane.MOMENT1, torch.float32)
        manager.set_plane_dtype(pages, Plane.MOMENT2, torch.float32)
    for manager in {experts.manager for experts in bindings}:
        manager.check_budget()
    on_demand = patches.active_runtime().config.distributed.fetch == "demand"
    if on_demand and not config.use_distributed_optimizer:
        raise ValueError("--megascale-fetch demand needs state that is sharded; add --use-distributed-optimizer")
    arithmetic = _arithmetic(config, dense, next((e.runtime for e in bindings), None))
    choice = patches.active_runtime().config.compute.optimizer_device
    adam = PagedAdam(
        bindings.items(),
        groups=[optimizer_groups.without_parameters(group, config) for group in groups],
        arithmetic=arithmetic,
        shards=shards,
        max_lag=next((e.runtime.config.paging.max_lag_steps for e in bindings), 0),
        on_demand=on_demand,
        in_host=settle_for(choice, modules=list(bindings), arithmetic=arithmetic).in_host,
    )
    for experts in bindings:
        experts.adam = adam
    return adam


def _clipping(
    clip: ClipConfig, chunks: Sequence[MegaScaleDDP], dense: ChainedOptimizer, paged: PagedOptimizer
) -> ModuleClipping | SkippingClipping | None:
    """What replaces stock's clipping; None where nothing does."""
    if not clip.skips_nonfinite:
        return None
    if not clip.is_cmsa:
        return SkippingClipping(clip_grad=paged.config.clip_grad, dense=dense, gradients=paged.gradients)
    clipping = ModuleClipping(
        clip,
        clip_grad=paged.config.clip_grad,
        chunks=[innermost(chunk.module) for chunk in chunks],
        dense=dense,
        gradients=paged.gradients,
        shards=paged.adam.shards,
        stats_group=paged.grad_stats_parallel_group,
        device=paged.device,
    )
    for chunk in chunks:
        chunk.loss_listener = clipping.report_loss
    return clipping


def _refuse_late(chunks: Sequence[torch.nn.Module]) -> None:
    """While the patches are in force nothing makes a plain ``MoELayer``: one that is there keeps stock's experts."""
    if any(type(module) is MoELayer for chunk in chunks for module in chunk.modules()):
        raise ValueError(
            "the model was built before MegaScale was enabled, and its experts are stock's; call "
            "megatron_ext.enable_from_args(args), or enable(), before the model is built"
        )


def _refuse_experts(chunks: Sequence[torch.nn.Module]) -> None:
    """Stock's optimizer would not see the pages of a model that is not wrapped, and never train them."""
    if any(isinstance(module, MegaScaleExperts) for chunk in chunks for module in chunk.modules()):
        bare = next(type(chunk).__name__ for chunk in chunks if not isinstance(chunk, MegaScaleDDP))
        raise ValueError(
            f"a model with paged experts has a chunk ({bare}) without megatron.core's DistributedDataParallel around "
            "it; wrap every chunk before get_megatron_optimizer() is called"
        )


def _refuse_dense_model(chunks: Sequence[MegaScaleDDP]) -> None:
    device = next(chunks[0].parameters()).device
    count = torch.tensor([sum(len(chunk.paged_experts) for chunk in chunks)], device=device)
    dist.all_reduce(count)
    if not count.item():
        raise ValueError("--megascale needs a mixture-of-experts model: no layer of this one has experts")


def _stats_group(dense: ChainedOptimizer, expert_parallel: bool) -> dist.ProcessGroup:
    """Ranks whose experts' gradients make up the whole model's, each once: the group of stock's expert optimizer."""
    first = dense.chained_optimizers[0]
    if isinstance(first, DistributedOptimizer) or not expert_parallel:
        return first.get_grad_stats_parallel_group()
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_model_pipeline_parallel_group()


def _arithmetic(config: OptimizerConfig, dense: ChainedOptimizer, runtime: Runtime | None) -> AdamArithmetic:
    """The arithmetic of stock's dense optimizer.

    Raises:
        ValueError: stock uses an optimizer whose arithmetic MegaScale does not have.
    """
    inner = next((o.optimizer for o in dense.chained_optimizers if o.optimizer is not None), None)
    decoupled, fused = bool(config.decoupled_weight_decay), False
    if inner is not None:
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            raise ValueError(
                f"stock chose {type(inner).__module__}.{type(inner).__name__}; with --megascale experts are stepped in "
                "torch's arithmetic only: hide Transformer Engine and Apex, so that stock uses torch.optim too"
            )
        fused = bool(inner.defaults.get("fused"))
    device = None if runtime is None else runtime.manager.arena.device
    kernels = runtime is not None and runtime.backend.name == "triton"
    return arithmetic_for(decoupled=decoupled, fused=fused, amsgrad=False, device=device, kernels=kernels)
