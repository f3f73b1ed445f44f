"""Dispatch where all experts are on this rank: nothing is sent, and rows are gathered and summed with the experts."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megascale_omni.experts.tokens import ComingCounts, rows_of_map
from megatron_ext.experts import MegaScaleExperts


def takes_the_place_of(stock: MoETokenDispatcher) -> bool:
    """Whether :class:`LocalTokenDispatcher` computes what a stock dispatcher does: one rank, no padding, no fusion."""
    config: TransformerConfig = stock.config
    return (
        type(stock) in (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
        and stock.ep_size == 1
        and stock.tp_size == 1
        and not config.moe_permute_fusion
        and not config.moe_pad_expert_input_to_capacity
        and not config.moe_router_padding_for_quantization
        and not config.moe_apply_probs_on_input
    )


class LocalTokenDispatcher(MoETokenDispatcher):
    """Takes the place of stock's dispatcher (see :func:`takes_the_place_of`); the layer asks it for the experts' sum.

    Tokens ``[T, h]`` pass through: :meth:`compute` gives them to the experts with the index of their rows. On an
    accelerator the host waits once, for the numbers of tokens, which have been on their way since the router; not where
    experts go ahead without them: a token has ``moe_router_topk`` experts at most, and rows are made for so many.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._shape: torch.Size | None = None
        self._routed: tuple[torch.Tensor, ComingCounts] | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the routing; tokens ``[T, h]`` and all probabilities ``[T, E]``."""
        self._shape = hidden_states.shape
        map_ET = routing_map.bool().T.contiguous()
        self._routed = map_ET, ComingCounts(map_ET.sum(1))
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.view(-1, hidden_states.shape[-1]), probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """They are here."""
        return hidden_states, probs

    def compute(self, experts: MegaScaleExperts, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """The sum ``[T, h]`` of each token's experts."""
        assert self._routed is not None
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        (map_ET, coming), self._routed = self._routed, None
        num_experts, num_tokens = map_ET.shape
        if experts.goes_ahead:
            expert_N, index_N = rows_of_map(map_ET, num_tokens * min(self.config.moe_router_topk, num_experts))
            place_N = (index_N * num_experts + expert_N).clamp_min(0)  # of rows of nobody: their result goes nowhere
            return experts.compute(hidden_states, coming, probs.reshape(-1).index_select(0, place_N), index_N)
        counts = coming.wait()
        expert_N, index_N = rows_of_map(map_ET, sum(counts))
        probs_N = probs.reshape(-1).index_select(0, index_N * num_experts + expert_N)
        return experts.compute(hidden_states, counts, probs_N, index_N)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """They are here."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sums in the shape that the tokens had."""
        assert self._shape is not None
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        output = hidden_states.view(self._shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
