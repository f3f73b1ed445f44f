"""The MoE layer: stock's router and shared experts around paged experts; stock's dispatcher, or ours."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext import routing, support
from megatron_ext.dispatcher import GroupsTokenDispatcher
from megatron_ext.experts import MegaScaleExperts
from megatron_ext.local_dispatch import LocalTokenDispatcher, takes_the_place_of
from megatron_ext.patches import active_runtime
from megatron_ext.runtime import Runtime

NO_OPTIMIZER = (
    "gradients of experts are computed, and no optimizer steps these experts: they are in pages, not in "
    "model.parameters(). To train them make the optimizer with megatron.core's get_megatron_optimizer, before "
    "the first step"
)
"""Said once where a loop makes an optimizer of its own, which would leave experts as they are."""


class MegaScaleMoELayer(MoELayer):
    """Stock's MoE layer with :class:`MegaScaleExperts` in place of its experts module, and perhaps its dispatcher."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **more: Any,  # noqa: ANN401 - what other releases add
    ) -> None:
        support.check("model", config)
        assert submodules is not None
        runtime = active_runtime()
        graphs = support.graphs_said(config, pages_leave=runtime.config.paging.device_budget is not None)
        if graphs is not None:
            runtime.warn_once(graphs)
        super().__init__(
            config=config,
            submodules=dataclasses.replace(submodules, experts=_paged(submodules.experts, runtime)),
            layer_number=layer_number,
            pg_collection=pg_collection,
            **more,
        )
        self._runtime = runtime
        self._settled = False
        keeper = runtime.observation.keeper
        if keeper is not None and keeper.reroutes:
            routing.check_reroute(config, runtime.config.distributed)
            routing.mask_frozen(self, keeper)
        if runtime.early_router is not None:
            runtime.early_router.add(self)
        groups = pg_collection or get_default_pg_collection()
        if runtime.config.distributed.dispatcher == "groups":
            self._use_groups(runtime, groups)
        elif takes_the_place_of(self.token_dispatcher):
            self._dispatch_with(LocalTokenDispatcher(self.config, groups))

    def _use_groups(self, runtime: Runtime, groups: ProcessGroupCollection) -> None:
        experts = self.experts
        assert isinstance(experts, MegaScaleExperts)
        members = torch.distributed.get_process_group_ranks(groups.ep)
        if len(members) == 1 and groups.expt_tp.size() == 1:
            runtime.warn_once(
                "distributed.dispatcher=groups has no effect with --expert-model-parallel-size 1: every rank has all "
                "experts, and no token travels; raise the one, or leave --megascale-dispatcher out"
            )
        dispatcher = GroupsTokenDispatcher(experts, self.config, groups, runtime.group_options(members))
        runtime.observation.dispatchers.append(dispatcher.core)
        self._dispatch_with(dispatcher)

    def _dispatch_with(self, dispatcher: MoETokenDispatcher) -> None:
        self.token_dispatcher = dispatcher
        if self.use_shared_expert and self.shared_expert_overlap:
            dispatcher.set_shared_experts(self.shared_experts)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As stock's: what the experts make of dispatched tokens, ready to be combined."""
        dispatcher, experts = self.token_dispatcher, self.experts
        assert isinstance(experts, MegaScaleExperts)
        if experts.adam is None and experts.trainable and self.training and torch.is_grad_enabled():
            self._runtime.warn_once(NO_OPTIMIZER)
        if isinstance(dispatcher, LocalTokenDispatcher):
            return dispatcher.compute(experts, hidden_states, probs), None
        if isinstance(dispatcher, GroupsTokenDispatcher) and not self.config.moe_apply_probs_on_input:
            return dispatcher.compute(experts, hidden_states), None
        return super().routed_experts_compute(hidden_states, probs)  # type: ignore[no-any-return]

    def set_layer_number(self, layer_number: int) -> None:
        """As stock; experts go where the placement has them in this layer. A collective where there is one."""
        super().set_layer_number(layer_number)
        placement = self._runtime.placement
        if placement is not None and not self._settled and isinstance(self.token_dispatcher, GroupsTokenDispatcher):
            self.token_dispatcher.settle(placement, layer_number)
            self._settled = True

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As stock; what the router chose in training is written down where that was asked for."""
        probs_TE, map_TE = super().route(hidden_states, padding_mask)
        writer = self._runtime.routing
        if writer is not None and self.training and torch.is_grad_enabled():
            writer.write(self.layer_number or 0, self._runtime.schedule.moment.step, map_TE.bool().cpu().numpy())
        return probs_TE, map_TE


def _paged(stock: Any, runtime: Runtime) -> Any:  # noqa: ANN401 - a spec, a class or a builder, as stock's release has it
    """What builds paged experts where ``stock`` built stock's."""
    given = {"stock_spec": stock, "runtime": runtime}
    if isinstance(stock, ModuleSpec | type):
        return ModuleSpec(module=MegaScaleExperts, params=given)
    return functools.partial(MegaScaleExperts, **given)
