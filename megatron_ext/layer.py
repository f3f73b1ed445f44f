"""The MoE layer: stock's router and shared experts around paged experts; stock's dispatcher, or ours."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext import support
from megatron_ext.dispatcher import GroupsTokenDispatcher
from megatron_ext.experts import MegaScaleExperts
from megatron_ext.local_dispatch import LocalTokenDispatcher, takes_the_place_of
from megatron_ext.patches import active_runtime
from megatron_ext.runtime import Runtime


class MegaScaleMoELayer(MoELayer):
    """Stock's MoE layer with :class:`MegaScaleExperts` in place of its experts module, and perhaps its dispatcher."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        support.check("model", config)
        assert submodules is not None
        runtime = active_runtime()
        paged = ModuleSpec(module=MegaScaleExperts, params={"stock_spec": submodules.experts, "runtime": runtime})
        super().__init__(
            config=config,
            submodules=dataclasses.replace(submodules, experts=paged),
            layer_number=layer_number,
            pg_collection=pg_collection,
        )
        groups = pg_collection or get_default_pg_collection()
        if runtime.config.distributed.dispatcher == "groups":
            self._use_groups(runtime, groups)
        elif takes_the_place_of(self.token_dispatcher):
            self._dispatch_with(LocalTokenDispatcher(self.config, groups))

    def _use_groups(self, runtime: Runtime, groups: ProcessGroupCollection) -> None:
        experts = self.experts
        assert isinstance(experts, MegaScaleExperts)
        self._dispatch_with(GroupsTokenDispatcher(experts, self.config, groups, runtime.group_options()))

    def _dispatch_with(self, dispatcher: MoETokenDispatcher) -> None:
        self.token_dispatcher = dispatcher
        if self.use_shared_expert and self.shared_expert_overlap:
            dispatcher.set_shared_experts(self.shared_experts)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As stock's: what the experts make of dispatched tokens, ready to be combined."""
        dispatcher, experts = self.token_dispatcher, self.experts
        if not isinstance(dispatcher, LocalTokenDispatcher):
            return super().routed_experts_compute(hidden_states, probs)  # type: ignore[no-any-return]
        assert isinstance(experts, MegaScaleExperts)
        return dispatcher.compute(experts, hidden_states, probs), None
