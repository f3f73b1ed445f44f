"""The MoE layer: stock's router, dispatcher and shared experts around paged experts."""

from __future__ import annotations

import dataclasses

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext import support
from megatron_ext.experts import MegaScaleExperts
from megatron_ext.patches import active_runtime


class MegaScaleMoELayer(MoELayer):
    """Stock's MoE layer with :class:`MegaScaleExperts` in place of its experts module."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        support.check("model", config)
        assert submodules is not None
        paged = ModuleSpec(
            module=MegaScaleExperts, params={"stock_spec": submodules.experts, "runtime": active_runtime()}
        )
        super().__init__(
            config=config,
            submodules=dataclasses.replace(submodules, experts=paged),
            layer_number=layer_number,
            pg_collection=pg_collection,
        )
