"""The simulator's bytes are those that collective calls are given, rank by rank; and what it must show at any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megascale_omni.topology.placement import Placement, in_order
from megascale_omni.topology.routing import Choices
from megascale_omni.topology.simulate import LayerShape, simulate
from tests.distributed.megatron_state import fresh_parallel_state
from tests.unit.megatron_ext.layers import EXPERTS, FFN, HIDDEN, build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

# Six tokens a rank, by rank: several experts of one rank, one, none; with EP 4 some groups are alone.
ROUTES: list[list[list[int]]] = [
    [[0, 1], [2, 3], [1], [], [0, 3], [1, 2]],
    [[3], [3], [2, 3], [0, 1, 2, 3], [0], [0]],
    [[1, 2], [1, 2], [1, 2], [1], [2], []],
    [[], [], [], [0, 1], [0], [3]],
]
PLACED = {2: ((0, 3), (1, 2)), 4: ((3,), (1,), (0,), (2,))}
GROUPS: dict[str, dict[str, Any]] = {
    "tokens": {"move": "tokens"},
    "pages": {"move": "pages"},
    "auto, gossip": {"move": "auto", "discovery": "gossip"},
    "pages, gossip": {"move": "pages", "discovery": "gossip"},
}


def sent_bytes(rank: int, world: int, *, placement: str, bf16: bool) -> dict[str, int]:
    """Bytes that this rank sends in a forward and backward, by dispatcher."""
    from scripts.comparison.collectives import CollectiveCounter

    fresh_parallel_state(ep=world)
    sides = {
        name: build(megascale=False, ep=world, bf16=bf16, dispatcher=name) for name in ("alltoall", "allgather")
    } | {name: build(megascale=True, ep=world, bf16=bf16, groups=options) for name, options in GROUPS.items()}
    sides["placed"] = build(
        megascale=True, ep=world, bf16=bf16, groups={"move": "tokens", "placement": placement}, layer_number=1
    )
    counter = CollectiveCounter()
    counter.install(everywhere=True)
    found = {}
    try:
        for name, side in sides.items():
            side.clear()
            before = counter.sent_bytes
            side.forward_backward(tokens(6, seed=rank), ROUTES[rank])
            found[name] = counter.sent_bytes - before
    finally:
        counter.remove()
    assert torch.distributed.all_reduce.__name__ == "all_reduce"
    assert not hasattr(torch.distributed.isend, "__wrapped__") or found
    return found


@pytest.mark.parametrize(("world", "bf16"), [(2, True), (4, False)], ids=["2-bf16", "4-fp32"])
def test_simulated_bytes_are_the_measured_ones(pools, tmp_path, world, bf16):
    Placement({"1": PLACED[world]}).write(tmp_path / "placement.json")
    measured = pools[world].run(sent_bytes, placement=str(tmp_path / "placement.json"), bf16=bf16)
    maps = np.zeros((world, 6, EXPERTS), dtype=bool)
    for rank in range(world):
        for token, experts in enumerate(ROUTES[rank]):
            maps[rank, token, experts] = True
    choices = [Choices.of_map(map_TE) for map_TE in maps]
    width = 2 if bf16 else 4
    shape = LayerShape(HIDDEN, EXPERTS, 3 * HIDDEN * FFN, width=width)
    simulated = {name: simulate(name, choices, shape) for name in ("alltoall", "allgather")}
    simulated |= {name: simulate("groups", choices, shape, **options) for name, options in GROUPS.items()}
    simulated["placed"] = simulate("groups", choices, shape, slots=PLACED[world])
    assert simulated["pages"].plan is not None
    assert simulated["pages"].plan.moves
    assert PLACED[world] != in_order(EXPERTS, world)
    for name, one in simulated.items():
        assert one.bytes_P.tolist() == [found[name] for found in measured], name
