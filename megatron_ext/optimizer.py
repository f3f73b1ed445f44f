"""What stands in for stock's ``get_megatron_optimizer``: a chain of its optimizer and one for the experts' pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer

from megascale_omni.clipping import ClipConfig
from megascale_omni.experts.shards import PageShards
from megascale_omni.optimizer.arithmetic import AdamArithmetic, arithmetic_for
from megascale_omni.optimizer.paged_adam import PagedAdam
from megascale_omni.optimizer.rates import settle_for
from megascale_omni.paging.planes import Plane
from megatron_ext import optimizer_groups, patches, support
from megatron_ext.chained_optimizer import MegaScaleChainedOptimizer
from megatron_ext.clipping import ModuleClipping, SkippingClipping
from megatron_ext.distributed import MegaScaleDDP, innermost
from megatron_ext.experts import SOURCE, MegaScaleExperts
from megatron_ext.paged_optimizer import PagedOptimizer
from megatron_ext.runtime import Runtime


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
