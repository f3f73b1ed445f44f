"""The groups dispatcher behind stock's protocol: once per rank, tokens or pages (``--megascale-dispatcher groups``)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megascale_omni.groups.channel import Channel
from megascale_omni.groups.dispatch import GroupDispatcher, GroupOptions, Trip
from megascale_omni.groups.settle import settle
from megascale_omni.topology.placement import Placement
from megatron_ext.experts import MegaScaleExperts


class GroupsTokenDispatcher(MoETokenDispatcher):
    """Takes the place of stock's dispatcher; computes the same from the same routing map and probabilities.

    Capacity, padding and dropping are in the routing map that the router hands over, so no case of its own is needed
    for them here.

    Args:
        experts: this rank's experts. config, pg_collection: as stock's. options: how groups are found and served.

    Raises:
        ValueError: padding for quantized products; pages that are to travel although they are spread over ranks, or
        although probabilities scale the experts' inputs, which visitors do not know; on every rank of the group, ranks
        whose options would have them make different plans. (Those are compared: building one is a collective.)
    """

    def __init__(
        self,
        experts: MegaScaleExperts,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        options: GroupOptions,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        if config.moe_router_padding_for_quantization:
            raise ValueError(
                "moe_router_padding_for_quantization is not supported with --megascale-dispatcher groups; leave it out"
            )
        on_input = bool(config.moe_apply_probs_on_input)
        if on_input and options.move == "pages":
            raise ValueError(
                "moe_apply_probs_on_input is not supported with --megascale-move pages; use auto, which is tokens then"
            )
        assert config.num_moe_experts is not None
        self.core = GroupDispatcher(
            Channel(self.ep_group),
            config.num_moe_experts,
            options=options,
            experts=None if on_input else experts,
            house=experts.runtime.guests,
            spread=Channel(self.tp_group),
        )
        self._experts = experts
        self._alike = (self.ep_group, self.tp_group, pg_collection.expt_dp)
        if self._differs(options.digest, self.ep_group):
            raise ValueError(
                "ranks of an expert-parallel group were given different --megascale-move, --megascale-discovery or "
                "--megascale-topology (of which ranks read the same file); give all the same"
            )
        self._trip: Trip | None = None
        self._routing: torch.Tensor | None = None
        self._shape: torch.Size | None = None

    def settle(self, placement: Placement, layer_number: int) -> None:
        """Brings this layer's experts to the ranks that the placement names. A collective of the group.

        Raises:
            ValueError: on every rank, where the placement does not fit the group or is not the same on all ranks.
        """
        slots, channel = placement.of_layer(layer_number), self.core.channel
        if self._differs(placement.digest, *self._alike):
            raise ValueError(f"layer {layer_number}: ranks have read different placements; give all the same file")
        placement.check_layers(self.config.num_layers + (self.config.mtp_num_layers or 0))
        if slots is None:
            return
        if (len(slots), len(slots) * len(slots[0])) != (channel.size, self.core.num_experts):
            raise ValueError(
                f"the placement of layer {layer_number} is for {len(slots)} ranks of {len(slots[0])} experts, the run "
                f"has {channel.size} of {self.core.local_experts}; plan one for it with `megascale topology plan`"
            )
        settle(self._experts, channel, slots)
        self._experts.numbers = slots[channel.rank]
        columns = torch.tensor([expert for rank in slots for expert in rank])
        self.core.columns = columns.to(self._experts.manager.arena.device)

    def _differs(self, digest: int, *groups: dist.ProcessGroup) -> bool:
        """Whether any rank of these groups, or of the same groups of those, has another one."""
        lowest = highest = digest
        for group in groups:
            known = torch.tensor([lowest, highest], device=self._experts.manager.arena.device)
            told = Channel(group).all_gather(known)
            lowest, highest = int(told.min()), int(told.max())
        return lowest != highest

    @property
    def trip(self) -> Trip:
        """The forward that is under way."""
        if self._trip is None:
            raise RuntimeError("tokens were not dispatched")
        return self._trip

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the routing; ``hidden_states`` become ``[T, h]``."""
        self._shape = hidden_states.shape
        self._routing = routing_map
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.view(-1, hidden_states.shape[-1]), probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts, plan, rows."""
        assert self._routing is not None
        self._trip = self.core.depart(hidden_states, self._routing, probs)
        self._routing = None
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens sorted by local expert, counts, probabilities."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        x_Nh, counts, probs_N = self.trip.arrive()
        return x_Nh, torch.tensor(counts), probs_N

    def compute(self, experts: MegaScaleExperts, hidden_states: torch.Tensor) -> torch.Tensor:
        """What is around the experts, and these, in one: rows sorted by expert live in scratch memory."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        return self.trip.compute(experts.compute)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Partial sums of the experts here."""
        return self.trip.partial_sums(hidden_states)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Partial sums go home."""
        return self.trip.send_back(hidden_states)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The sums of each token, in the shape that came."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        assert self._shape is not None
        output = self.trip.finish(hidden_states).view(self._shape)
        self._trip = None
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def metrics(self) -> dict[str, float]:
        """What the groups did so far (:meth:`GroupDispatcher.stats`)."""
        return self.core.stats()
