"""MegaScaleDDP: stock's data-parallel wrapper, with the gradient pages of paged experts beside its buffers.

Stock's buffers hold every parameter it finds; paged experts are none. Each method that stock applies to its buffers is
applied to the gradient pages too, with stock's scaling, accumulation dtype and process groups.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megascale_omni.experts.completion import LastGradients
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.heat.agreement import GroupExchange
from megascale_omni.paging.planes import PageNumbering, Plane
from megascale_omni.schedule import Phase
from megatron_ext import patches, support
from megatron_ext.experts import MegaScaleExperts


class MegaScaleDDP(DistributedDataParallel):
    """Stock's DistributedDataParallel for a model chunk that may hold paged experts."""

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        **more: Any,  # noqa: ANN401 - what other releases add
    ) -> None:
        support.check("ddp", ddp_config)
        if patches.active_runtime().config.clip.skips_nonfinite:  # stock's check would end the run instead
            ddp_config = dataclasses.replace(ddp_config, check_for_nan_in_grad=False)
        super().__init__(
            config=config,
            ddp_config=ddp_config,
            module=module,
            disable_bucketing=disable_bucketing,
            pg_collection=pg_collection,
            **more,
        )
        named = [(n, m) for n, m in module.named_modules() if isinstance(m, MegaScaleExperts)]
        self.paged_experts = [experts for _, experts in named]
        distributed = patches.active_runtime().config.distributed
        wire, travel = distributed.grad_wire, distributed.dispatcher == "groups" and distributed.move != "tokens"
        self.gradients = ExpertGradients(self.paged_experts, wire=wire)
        if named and wire != "fp32" and self.expt_dp_group.size() == 1 and not travel:
            patches.active_runtime().warn_once(
                f"distributed.grad_wire={wire} has no effect where no expert has a second copy (expert data parallel "
                "size 1) and no pages travel: no gradient of one does; add ranks, or leave --megascale-grad-wire out"
            )
        self.gradient_scale = 1.0 if config.calculate_per_token_loss else 1.0 / self.dp_cp_group.size()
        self.loss_listener: Callable[[torch.Tensor], None] | None = None
        self._micro_batch = 0
        self.micro_batches: int | None = None  # of this step, as stock's schedule says
        self.last_gradients: LastGradients | None = None
        if named and self._completes_in_backward():
            self.last_gradients = LastGradients(
                self.gradients,
                scale=self.gradient_scale,
                backwards=lambda: self.micro_batches,
                ends_run=ddp_config.check_for_nan_in_grad,
            )
        # The first chunk of a run with experts tells the schedule when a step begins.
        self._begins_steps = bool(self.paged_experts) and self.paged_experts[0].pages.entry.module == 0
        self._chunk = getattr(innermost(module), "vp_stage", None) or 0
        for name, experts in named:
            path = f"chunk {self._chunk}: {name.removeprefix('module.')}"
            numbering = experts.manager.numbering
            numbering.rename(experts.pages.entry.module, _free_path(path, numbering))
            dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else experts.pages.dtypes[Plane.WEIGHT]
            experts.manager.set_plane_dtype(experts.pages, Plane.GRADIENT, dtype)

        if named:
            self._agree_on_heat(config.moe_router_topk)

    def _agree_on_heat(self, topk: int) -> None:
        """Experts are frozen by what all ranks saw of them, where others have the same or the rest of them.

        Raises:
            ValueError: routers are to leave frozen experts out, and layers have different numbers of experts.
        """
        experts = self.paged_experts[0]
        keeper, manager = patches.active_runtime().observation.keeper, experts.manager
        alone = self.ep_group.size() == 1 and self.expt_dp_group.size() == 1
        if keeper is None or keeper.agrees or (alone and not keeper.reroutes):
            return
        counts = {module.entry.num_experts for module in manager.modules}
        if len(counts) == 1:
            exchange = GroupExchange(
                experts.num_experts, owners=self.ep_group, replicas=self.expt_dp_group, device=manager.arena.device
            )
            keeper.agree(exchange, awake=topk)
        elif keeper.reroutes:
            raise ValueError(
                f"--megascale-frozen reroute needs layers with equally many experts, not {sorted(counts)}; leave it out"
            )

    # -- schedule
    # -------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - stock's signature
        """Stock's forward, announced to the schedule."""
        if not self.paged_experts:
            return super().forward(*inputs, **kwargs)
        phase = Phase.FORWARD if self.module.training else Phase.EVAL
        with self.paged_experts[0].manager.schedule.enter(phase, micro_batch=self._micro_batch, chunk=self._chunk):
            result = super().forward(*inputs, **kwargs)
        self._micro_batch += phase is Phase.FORWARD
        return result

    # -- gradients
    # ------------------------------------------------------------------------------------------------------

    def zero_grad_buffer(self) -> None:
        """As stock; gradient pages become absent."""
        super().zero_grad_buffer()
        if self._begins_steps:
            schedule = self.paged_experts[0].manager.schedule
            schedule.begin_step(schedule.moment.step + 1)
        self.gradients.drop()
        self._micro_batch, self.micro_batches = 0, None

    def _completes_in_backward(self) -> bool:
        """Whether a gradient is complete after the chunk's own backwards: no other rank adds to it."""
        runtime, manager = patches.active_runtime(), self.paged_experts[0].manager
        if not runtime.config.paging.step_in_backward or self.expt_dp_group.size() > 1:
            return False
        if runtime.config.distributed.dispatcher != "stock":  # pages may be computed on other ranks
            return False
        # On an accelerator that holds every page, a look at each gradient would make the host wait for nothing.
        return manager.arena.device.type == "cpu" or manager.pager.can_evict

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """As stock; gradient pages are checked, scaled and summed over the ranks that hold the same experts.

        With a distributed optimizer only a page's owner has its sum afterwards.
        """
        shards = next((experts.adam.shards for experts in self.paged_experts if experts.adam is not None), None)
        self.gradients.finish(scale=self.gradient_scale, group=self.expt_dp_group, shards=shards)
        if self.ddp_config.check_for_nan_in_grad:
            self._check_finite()
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def _check_finite(self) -> None:
        """Every rank ends, with the expert or parameter named, when a gradient on any rank is not finite.

        Raises:
            RuntimeError: on every rank of the job.
        """
        bad = self.gradients.non_finite or self._first_non_finite_parameter()
        flag = torch.tensor([float(bad is not None)], device=next(self.module.parameters()).device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, bad)
        where = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(found) if what is not None)
        raise RuntimeError(
            f"non-finite gradient before the data-parallel reduction: {where}. "
            "Training stops as stock's does; --no-check-for-nan-in-loss-and-grad goes on without this check"
        )

    def _first_non_finite_parameter(self) -> str | None:
        # With overlap_grad_reduce buckets are on their way already and stock checks each as it leaves.
        if self.ddp_config.overlap_grad_reduce:
            return None
        gradients = ((name, getattr(p, "main_grad", None)) for name, p in self.module.named_parameters())
        norms = {name: torch.linalg.vector_norm(g.float()) for name, g in gradients if g is not None}
        if not norms or bool(torch.isfinite(torch.stack(list(norms.values()))).all()):  # an accelerator tells once
            return None
        return next(f"parameter {name}" for name, norm in norms.items() if not bool(torch.isfinite(norm)))

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """As stock; gradient pages are multiplied too."""
        super().scale_gradients(scaling_factor)
        self.gradients.scale(scaling_factor)

    def broadcast_params(self) -> None:
        """As stock; weight pages come from the first rank of the expert-data-parallel group."""
        super().broadcast_params()
        source = dist.get_global_rank(self.expt_dp_group, 0)
        for experts in self.paged_experts:
            for name in np.ndindex(experts.num_experts, experts.layout.num_slices):
                with experts.lease(Plane.WEIGHT, [name]) as lease:
                    lease.mark_dirty()
                    dist.broadcast(lease.page(*name), src=source, group=self.expt_dp_group)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """As stock; gradient pages, whose contents are undefined from here on, become absent."""
        super().offload_grad_buffers(synchronize=synchronize, empty_cache=empty_cache)
        self.gradients.drop()


def tell_micro_batches(
    original: Callable[..., Any],
    forward_step_func: Callable[..., Any],
    data_iterator: Any,  # noqa: ANN401 - stock's signature, here and below
    model: torch.nn.Module,
    num_microbatches: int,
    *inputs: Any,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Stock's ``forward_step``; a model chunk that trains learns how many micro-batches the step has."""
    if isinstance(model, MegaScaleDDP) and model.training:
        model.micro_batches = num_microbatches
    return original(forward_step_func, data_iterator, model, num_microbatches, *inputs, **options)


def _free_path(path: str, numbering: PageNumbering) -> str:
    """``path``, numbered where another model of the run (a teacher, a second tower) has a module of that path."""
    taken = {numbering.path(entry.module) for entry in numbering.entries}
    return next(p for n in itertools.count(1) if (p := path if n == 1 else f"{path} ({n})") not in taken)


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """What is inside of wrappers."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module  # type: ignore[assignment]
    return module
