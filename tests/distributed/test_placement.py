"""Experts where a placement has them: the same results, the same checkpoints, by global number."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.groups.settle import copies_of
from megascale_omni.topology.levels import Level, Topology
from megascale_omni.topology.placement import Placement, in_order
from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.test_experts_of_ranks import differences
from tests.unit.megatron_ext.layers import Side, build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

SLOTS = {2: ((1, 2), (0, 3)), 4: ((2,), (0,), (3,), (1,))}
ROUTES = [[[0, 1], [2, 3], [1]], [[0, 2], [3]], [[], [1, 3]], [[2]]]


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4]))
def test_copies_settle_any_placement_with_one_expert_aside(order, ranks):
    local = 12 // ranks
    slots = tuple(tuple(order[p * local : (p + 1) * local]) for p in range(ranks))
    holds = {slot: slot[0] * local + slot[1] for slot in itertools.product(range(ranks), range(local))}
    kept, begins = None, True
    for copy in copies_of(slots):
        if begins:
            kept = holds[copy.target]
        value = kept if copy.kept else holds[copy.source]
        assert value is not None
        holds[copy.target], begins = value, copy.kept
    assert [holds[p, j] for p in range(ranks) for j in range(local)] == list(order)
    assert not list(copies_of(in_order(12, ranks)))


def by_global_name(side: Side) -> dict[str, torch.Tensor]:
    """This rank's expert tensors as the sharded state dict names them: model and optimizer."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    inner = side.ddp.module
    model = (inner.module if hasattr(inner, "module") else inner).mlp.experts.sharded_state_dict(
        "experts.", metadata={"singleton_local_shards": False, "dp_cp_group": side.ddp.dp_cp_group}
    )
    found = {}
    for value in nested_values(model):
        if isinstance(value, ShardedTensor):
            found[f"{value.key} {tuple(value.global_offset)} of {value.global_shape}"] = value.data.clone()
        elif isinstance(value, ShardedTensorFactory):  # gate and up are two tensors to stock
            for part in nested_values({"x": value.build_fn(value.key, value.data, value.replica_id, None)}):
                found[f"{part.key} {tuple(part.global_offset)} of {part.global_shape}"] = part.data.clone()
    return found


def train_placed(rank: int, world: int, *, path: str, kind: dict[str, Any], move: str) -> Any:
    """Two steps beside stock; differences, and this rank's experts by global name on both sides."""
    ep = kind.pop("ep")
    fresh_parallel_state(ep=ep)
    stock = build(megascale=False, ep=ep, **kind)
    ours = build(megascale=True, ep=ep, poison=True, groups={"placement": path, "move": move}, layer_number=1, **kind)
    found: list[str] = []
    for step in range(2):
        routes = ROUTES[(rank + step) % 4]
        x_Th = tokens(len(routes), seed=10 * step + rank)
        given_by = []
        for side in (stock, ours):
            side.clear()
            output, grad_tokens, grad_probs = side.forward_backward(x_Th, routes)
            side.reduce()
            _, norm, zeros = side.step()
            given_by.append(
                {"output": output, "tokens": grad_tokens, "probs": grad_probs}
                | {"norm": torch.tensor(norm), "zeros": torch.tensor(zeros)}
            )
        found += [f"step {step}: {what}" for what in differences(*given_by)]
    return found, by_global_name(stock), by_global_name(ours), ours.layer.experts.numbers


@pytest.mark.parametrize(
    ("world", "kind", "move"),
    [
        (2, {"ep": 2, "bias": True}, "tokens"),
        (4, {"ep": 4}, "pages"),
        (4, {"ep": 2, "distributed": True, "gated": False}, "auto"),
    ],
    ids=["ep2-tokens", "ep4-pages", "ep2dp2-distributed"],
)
def test_a_placed_layer_trains_as_stock_and_is_saved_by_global_number(pools, tmp_path, world, kind, move):
    ep = kind["ep"]
    Placement({"1": SLOTS[ep]}).write(tmp_path / "placement.json")
    answers = pools[world].run(train_placed, path=str(tmp_path / "placement.json"), kind=kind, move=move)
    stock: dict[str, torch.Tensor] = {}
    ours: dict[str, torch.Tensor] = {}
    for rank, (found, theirs, own, numbers) in enumerate(answers):
        assert found == []
        assert numbers == SLOTS[ep][rank % ep]
        stock |= theirs
        ours |= own
    assert differences(stock, ours) == []
    assert len(ours) >= 8


def plan_differently(rank: int, world: int, *, folder: str) -> list[str]:
    """What each rank says where one has another flag or file."""
    fresh_parallel_state(ep=2)
    found = []
    different: tuple[dict[str, object], ...] = (
        {"move": "pages" if rank else "tokens"},
        {"topology": str(Path(folder) / f"{rank}.json")},
        {"discovery": "gossip" if rank else "allgather"},
    )
    for groups in different:
        with pytest.raises(ValueError) as error:
            build(megascale=True, ep=2, groups=groups)
        found.append(str(error.value))
    return found


def test_ranks_that_would_plan_differently_are_refused_before_they_do(pools, tmp_path):
    for rank in range(2):
        Topology.uniform(2, levels=(Level("node", 1e9 + rank), Level("rack", 1e8), Level("net", 1e7))).write(
            tmp_path / f"{rank}.json"
        )
    for told in pools[2].run(plan_differently, folder=str(tmp_path)):
        assert len(told) == 3
        assert all("were given different --megascale-move, --megascale-discovery or" in text for text in told)


def settle_badly(rank: int, world: int, *, folder: str, case: str) -> str:
    fresh_parallel_state(ep=2)
    path = Path(folder) / {"different": f"different{rank % 2}", "copy": f"different{rank // 2}"}.get(case, case)
    path = path.with_suffix(".json")
    with pytest.raises(ValueError) as error:
        build(megascale=True, ep=2, groups={"placement": str(path)}, layer_number=1)
    return str(error.value)


def test_placements_that_do_not_fit_are_refused_on_every_rank(pools, tmp_path):
    for rank in range(2):
        Placement({"1": SLOTS[2] if rank else in_order(4, 2)}).write(tmp_path / f"different{rank}.json")
    Placement({"default": SLOTS[4]}).write(tmp_path / "ranks.json")
    Placement({"1": SLOTS[2], "7": SLOTS[2]}).write(tmp_path / "layers.json")
    for world, case, message in [
        (2, "different", "layer 1: ranks have read different placements; give all the same file"),
        (4, "copy", "layer 1: ranks have read different placements; give all the same file"),
        (2, "ranks", "the placement of layer 1 is for 4 ranks of 1 experts, the run has 2 of 2"),
        (2, "layers", "the placement has layers [7], the model has 1: it was planned for another model"),
    ]:
        for found in pools[world].run(settle_badly, folder=str(tmp_path), case=case):
            assert message in found


def record(rank: int, world: int, *, folder: str) -> list[int]:
    """What is read of the file that a layer wrote."""
    import megatron_ext
    from megascale_omni.topology.routing import read_record, record_path

    fresh_parallel_state(ep=2)
    side = build(megascale=True, ep=2, groups={}, routing=folder, layer_number=5, stay_enabled=True)
    for step in range(3):
        side.train((tokens(3, seed=rank), [[0], [1, 2], []]))
        with torch.no_grad():
            side.forward(tokens(3, seed=rank), [[0], [1, 2], []])
        assert step < 3
    megatron_ext.disable()
    read = list(read_record(record_path(folder, rank)))
    assert all(r.layer == 5 for r in read)
    assert all(np.array_equal(r.map_TE.sum(0), [1, 1, 1, 0]) for r in read)
    path = record_path(folder, rank)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(list(read_record(path))) == len(read) - 1, "a file that was cut off is read up to there"
    return [r.step for r in read]


def test_what_routers_chose_in_training_is_written_down(pools, tmp_path):
    for steps in pools[2].run(record, folder=str(tmp_path)):
        assert len(steps) == 3
        assert len(set(steps)) == 3
