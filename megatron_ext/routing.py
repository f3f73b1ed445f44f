"""What is added to stock's routers, where it is asked for: early prediction, and a mask of frozen experts.

The prediction (``--megascale-prefetch early-router``) asks the next layer's router about this layer's input; it decides
about io only [Note: foresight]. The mask (``--megascale-frozen reroute``) changes the mathematics: logits of experts
that all ranks agreed to freeze are minus infinity, so that their tokens go to the next-best ones [Note: agreed heat].
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megascale_omni.config import DistributedConfig
from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.paging.foresight import Foresight

if TYPE_CHECKING:  # importing the plug-in must not import stock before its hooks are in place
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ext.layer import MegaScaleMoELayer

_NOT_REROUTED = {
    "moe_router_enable_expert_bias": "its bias could choose a frozen expert",
    "moe_router_num_groups": "groups of experts are ranked before experts are",
    "moe_router_force_load_balancing": "it does not look at the router's logits",
}
"""Options of stock's router with which a mask of its logits does not do what it says."""


def check_reroute(config: TransformerConfig, distributed: DistributedConfig) -> None:
    """Refuses routers whose choice a mask of the logits does not decide, and tokens that no owner sees.

    Raises:
        ValueError: names the option, and what to do instead.
    """
    for option, reason in _NOT_REROUTED.items():
        if getattr(config, option, None):
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"--megascale-frozen reroute does not go with {flag}: {reason}; leave one of them out")
    if distributed.dispatcher == "groups" and distributed.move != "tokens":
        raise ValueError(
            f"--megascale-frozen reroute does not go with --megascale-move {distributed.move}: an expert's owner does "
            "not see the tokens that its pages travel to; use --megascale-move tokens"
        )
    if "sinkhorn" in str(config.moe_router_load_balancing_type):
        raise ValueError(
            "--megascale-frozen reroute does not go with --moe-router-load-balancing-type sinkhorn, which balances "
            "tokens over all experts; use aux_loss, or leave reroute out"
        )


def mask_frozen(layer: MegaScaleMoELayer, keeper: HeatKeeper) -> None:
    """From here on the layer's router sees frozen experts as out of the question."""
    gating, module = layer.router.gating, layer.experts.pages.entry.module
    known: list[Any] = [None, None]  # the keeper's mask, and the same as a tensor

    def masked(*inputs: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - stock's signature
        logits: torch.Tensor = gating(*inputs, **options)
        frozen = keeper.frozen(module)
        if frozen is None:
            return logits
        if known[0] is not frozen:
            known[:] = frozen, _by_column(layer, frozen).to(logits.device)
        return logits.masked_fill(known[1], float("-inf"))

    layer.router.gating = masked


def _by_column(layer: MegaScaleMoELayer, frozen: np.ndarray) -> torch.Tensor:
    """A mask over (rank, local expert) as one over the router's columns: a placement may have put experts elsewhere."""
    mask, columns = torch.from_numpy(frozen), getattr(getattr(layer.token_dispatcher, "core", None), "columns", None)
    if columns is None:
        return mask
    result = torch.zeros_like(mask)
    result[columns.cpu()] = mask
    return result


class EarlyRouter:
    """Predicts each layer's experts from its own router on the input of the layer before it."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight
        self._last: weakref.ref[MegaScaleMoELayer] | None = None

    def add(self, layer: MegaScaleMoELayer) -> None:
        """The next layer of the model, in the order of their construction."""
        before = None if self._last is None else self._last()
        if before is not None:
            following = weakref.ref(layer)
            before.router.register_forward_pre_hook(lambda router, inputs: self._ask(following(), inputs[0]))
        self._last = weakref.ref(layer)

    @torch.no_grad()
    def _ask(self, layer: MegaScaleMoELayer | None, hidden: torch.Tensor) -> None:
        recompute = torch._C._current_graph_task_id() != -1  # its experts are known
        if layer is None or recompute:
            return
        router = layer.router
        x_Th = hidden.detach().reshape(-1, hidden.shape[-1]).to(router.weight.dtype)
        bias = getattr(router, "bias", None)
        scores_TE = torch.nn.functional.linear(x_Th, router.weight, bias)
        if getattr(router, "expert_bias", None) is not None:
            scores_TE = scores_TE.float().sigmoid() + router.expert_bias
        chosen = scores_TE.topk(layer.config.moe_router_topk, dim=-1).indices
        named = np.zeros(layer.config.num_moe_experts, dtype=bool)
        named[chosen.reshape(-1).cpu().numpy()] = True
        self._foresight.predict(layer.experts.pages.entry.module, named[list(layer.experts.numbers)])
