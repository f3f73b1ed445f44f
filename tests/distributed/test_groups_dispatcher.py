"""The groups dispatcher beside stock's two: outputs, gradients of tokens, router and experts, and whole steps.

One layer with a router that routes as it is told, on the same ranks with the same weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.test_experts_of_ranks import Routes, differences, train
from tests.unit.megatron_ext.layers import EXPERTS, build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

# Which experts each of a rank's tokens goes to, by rank modulo 4. With EP 2 rank 0 has experts 0 and 1, with EP 4 rank
# r has expert r.
CASES: dict[str, list[list[list[int]]]] = {
    "all to one expert": [[[3], [3]], [[3], [3]], [[3]], [[3], [3], [3]]],
    "one token in all": [[[2]], [], [], []],
    "nothing from rank 1": [[[0, 3], [2]], [], [[1, 2]], [[0]]],
    "no tokens at all": [[], [], [], []],
    "overlapping groups": [[[0]], [[0, 1]], [[1, 2]], [[2, 0]]],
    "own experts only": [[[0]], [[1]], [[2]], [[3]]],
    "everywhere, several at once": [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[1, 3], [0, 2]], [[0, 3], [], [1, 2, 3]]],
    "counts that differ": [[[0, 1]] * 7, [[2, 3]], [[1, 2]] * 3, [[0, 1, 2]] * 5],
}


def train_each_case(rank: int, world: int, *, ep: int, groups: dict[str, object], kind: dict[str, Any]) -> Any:
    """A step a case on stock's side and ours; what differs, by case. Memory is poisoned where it is taken."""
    fresh_parallel_state(ep=ep)
    stock = build(megascale=False, ep=ep, **kind)
    ours = build(megascale=True, ep=ep, poison=True, groups=groups, **kind)
    found = {}
    for step, (name, by_rank) in enumerate(CASES.items()):
        routes: Routes = by_rank[rank % 4]
        x_Th = tokens(len(routes), seed=100 * step + rank)
        first, second = train(stock, x_Th, routes), train(ours, x_Th, routes)
        tolerance = 1e-4
        if kind.get("bf16"):
            # Stock sums a token's experts in bf16, one after the other; here partial sums are in fp32. Adam makes large
            # updates of small gradients, so that updates are left to the proof, and steps start from the same state.
            tolerance = 3e-2
            first, second = ({n: t for n, t in side.items() if _before_the_step(n)} for side in (first, second))
            ours.state.load(stock.state.state())
        found[name] = differences(first, second, tolerance=tolerance)
        if groups["move"] == "pages":
            guests = ours.layer.token_dispatcher.core.pages.guests
            if guests.manager.present(guests.pages, 0).any() or guests.manager.present(guests.pages, 1).any():
                found[name].append("visitors are still here")
    counts = ours.layer.token_dispatcher.metrics()
    return found, counts["group_cache_hits"] + counts["group_cache_misses"]


def _before_the_step(name: str) -> bool:
    return name in ("output", "norm") or not name.startswith(("weight ", "master ", "exp_avg", "zeros"))


@pytest.mark.parametrize(
    ("world", "ep", "groups", "kind"),
    [
        (2, 2, {"move": "tokens"}, {"bias": True}),
        (2, 2, {"move": "pages"}, {"bias": True}),
        (2, 2, {"move": "auto"}, {"bf16": True, "gated": False}),
        (2, 2, {"move": "pages"}, {"bf16": True, "distributed": True}),
        (4, 4, {"move": "tokens"}, {}),
        (4, 4, {"move": "pages", "discovery": "gossip"}, {"bias": True}),
        (4, 2, {"move": "tokens", "discovery": "gossip"}, {"distributed": True}),
        (4, 2, {"move": "pages"}, {"distributed": True}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_step_gives_what_stock_gives(pools, world, ep, groups, kind):
    for found, looked_up in pools[world].run(train_each_case, ep=ep, groups=groups, kind=kind):
        assert found == {name: [] for name in CASES}
        assert looked_up == len(CASES) * EXPERTS


# --- capacity, dropping, padding, shared experts ----------------------------------------------------------------------


PADDED: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
"""A padding mask is given, which the auxiliary loss reads."""


ON_INPUT: dict[str, Any] = {
    "moe_apply_probs_on_input": True,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
}


def train_capacity(
    rank: int, world: int, *, kind: dict[str, Any], moves: tuple[str, ...] = ("tokens", "pages")
) -> list[str]:
    """Stock's own router with these options, on both sides; outputs, gradients of tokens and of the router."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    import megatron_ext
    from megascale_omni.config import MegaScaleConfig
    from tests.unit.megatron_ext.layers import transformer_config

    fresh_parallel_state(ep=world)
    kind = {"gated": True, "bias": False, **kind}
    config = transformer_config(ep=world, dtype=torch.float32, dispatcher="alltoall", **kind)
    given = []
    for groups in (None, *moves):
        torch.manual_seed(7)
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        if groups is not None:
            chosen = MegaScaleConfig().replace("paging", page_size_bytes="64KiB")
            megatron_ext.enable(chosen.replace("distributed", dispatcher="groups", move=groups))
        spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
        layer = MoELayer(config, spec.submodules)
        layer.set_layer_number(1)
        megatron_ext.disable()
        x = tokens(12, seed=rank).unsqueeze(1).requires_grad_()
        padding = torch.arange(12).unsqueeze(0) >= 9 if kind.get("moe_aux_loss_coeff") else None
        output, _ = layer(x, padding_mask=padding)
        (output * torch.linspace(-1, 1.5, output.numel()).view_as(output)).sum().backward()
        router = layer.router.weight.grad
        assert router.norm() > 0
        given.append({"output": output.detach(), "tokens": x.grad, "router": router})
        if layer.shared_experts is not None:
            given[-1]["shared"] = layer.shared_experts.linear_fc1.weight.grad
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # what this class keeps has another shape in a trainer
    return [what for ours in given[1:] for what in differences(given[0], ours)]


@pytest.mark.parametrize(
    "kind",
    [
        {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs", **PADDED},
        {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True, "bias": True, **PADDED},
        PADDED,
        {"moe_shared_expert_intermediate_size": 48},
        {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True},
    ],
    ids=[
        "by probability, padding mask",
        "by position",
        "pad",
        "drop and pad, padding mask",
        "padding mask",
        "shared experts",
        "shared, overlap",
    ],
)
def test_capacity_padding_and_shared_experts(pools, kind):
    assert pools[2].run(train_capacity, kind=kind) == [[]] * 2


def refused(rank: int, world: int, *, kind: dict[str, Any]) -> str:
    fresh_parallel_state(ep=world)
    with pytest.raises(ValueError) as error:
        build(megascale=True, ep=world, groups={"move": "pages"}, **kind)
    return str(error.value)


def test_probabilities_on_the_input_go_with_tokens_and_not_with_pages(pools):
    assert pools[2].run(train_capacity, kind=ON_INPUT, moves=("tokens", "auto")) == [[]] * 2
    for refusal in pools[2].run(refused, kind=ON_INPUT):
        assert "moe_apply_probs_on_input is not supported with --megascale-move pages" in refusal
