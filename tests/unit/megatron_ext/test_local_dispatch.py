"""Dispatch on one rank: the bits of stock's dispatchers around the same experts, where it takes their place."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from megascale_omni.experts.tokens import ComingCounts
from megatron_ext import layer
from megatron_ext.local_dispatch import LocalTokenDispatcher
from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import build, tokens

ROUTES = [[0, 1], [1, 2], [], [2, 3], [3], [0, 1, 2, 3], [0, 2]]

SHARED = {"moe_shared_expert_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "biases": {"bias": True, "gated": False},
    "shared experts": SHARED,
    "shared experts beside": {**SHARED, "moe_shared_expert_overlap": True},
}


def beside_stocks(rank: int, world: int, *, kind: str, dispatcher: str) -> None:
    fresh_parallel_state()
    ours = build(megascale=True, dispatcher=dispatcher, **KINDS[kind])
    with mock.patch.object(layer, "takes_the_place_of", return_value=False):
        stocks = build(megascale=True, dispatcher=dispatcher, **KINDS[kind])
    assert type(ours.layer.token_dispatcher) is LocalTokenDispatcher
    assert type(stocks.layer.token_dispatcher) in (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
    dtype = torch.bfloat16 if "bf16" in KINDS[kind] else torch.float32
    results = []
    for side in (stocks, ours):
        side.clear()
        given = side.forward_backward(tokens(len(ROUTES), seed=3).to(dtype), ROUTES)
        side.reduce()
        results.append([*given, *side.experts_gradients().values()])
    for stock, paged in zip(*results, strict=True):
        assert stock.equal(paged)


CASES = [(kind, dispatcher) for kind in KINDS for dispatcher in ("alltoall", "allgather")]
CASES.remove(("shared experts beside", "allgather"))  # stock's all-gather dispatcher has no place for them


@pytest.mark.parametrize(("kind", "dispatcher"), CASES)
def test_the_bits_are_those_of_stocks_dispatcher(pools, kind: str, dispatcher: str) -> None:
    pools[1].run(beside_stocks, kind=kind, dispatcher=dispatcher)


def left_to_stock(rank: int, world: int, *, options: dict[str, Any]) -> None:
    fresh_parallel_state()
    assert type(build(megascale=True, **options).layer.token_dispatcher) is MoEAlltoAllTokenDispatcher


@pytest.mark.parametrize(
    "options",
    [
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    ],
    ids=["padded", "probabilities on the input"],
)
def test_what_it_does_not_compute_stays_with_stock(pools, options: dict[str, Any]) -> None:
    pools[1].run(left_to_stock, options=options)


class Waits(TorchDispatchMode):
    """Counts the operators whose results an accelerator has to tell the host: their values or their sizes."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "repeat_interleave", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.WAITING:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def waits(rank: int, world: int) -> None:
    fresh_parallel_state()
    ours = build(megascale=True, dispatcher="alltoall")
    dispatcher = ours.layer.token_dispatcher
    assert type(dispatcher) is LocalTokenDispatcher
    route = torch.zeros(len(ROUTES), 4, dtype=torch.bool)
    for token, experts in enumerate(ROUTES):
        route[token, experts] = True
    hidden = tokens(len(ROUTES), seed=3)
    with (
        mock.patch.object(ComingCounts, "wait", autospec=True, side_effect=ComingCounts.wait) as waited,
        Waits() as mode,
    ):
        x, probs = dispatcher.dispatch_preprocess(hidden, route, torch.rand(len(ROUTES), 4) * route)
        x, probs = dispatcher.token_dispatch(x, probs)
        assert waited.call_count == 0, "the counts come meanwhile"
        dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.compute(ours.layer.experts, x, probs)))
        assert waited.call_count == 1
        assert mode.found == []
        probs.nonzero()
        assert mode.found == ["nonzero"], "the mode sees what waits"
        mode.found.clear()
        kind = type(ours.layer.experts)
        with mock.patch.object(kind, "goes_ahead", True), mock.patch.object(kind, "compute") as compute:
            few = route & (route.cumsum(1) <= 2)
            x, probs = dispatcher.dispatch_preprocess(hidden, few, torch.rand(len(ROUTES), 4) * few)
            dispatcher.compute(ours.layer.experts, x, probs)
        assert (waited.call_count, mode.found) == (1, [])
        _, coming, probs_N, index_N = compute.call_args.args
        assert coming.wait() == few.sum(0).tolist()
        rows = sum(coming.wait())
        assert index_N.shape == probs_N.shape == (2 * len(ROUTES),)
        assert probs_N[:rows].equal(probs.T[few.T])
        assert (index_N[rows:] == -1).all()


def test_the_host_waits_for_the_counts_and_for_nothing_else(pools) -> None:
    pools[1].run(waits)
