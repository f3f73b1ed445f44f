"""The paged layer beside stock's where tensor, sequence or context parallelism cuts the tokens.

Whole models with these do not run without an accelerator: stock's normalisation refuses sequence parallelism there, and
its attention context parallelism. The layer does, with the process groups that such a model has.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.test_experts_of_ranks import Routes, differences, train
from tests.unit.megatron_ext.layers import build, tokens

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
CONTEXT = {"context_parallel_size": 2}
BY_RANK: list[list[list[list[int]]]] = [
    [[[0, 3], [2]], [[1]], [[1, 2]], [[0], [3]]],
    [[[0, 1, 2, 3]], [], [[2]], [[1, 3]]],
    [[[3]] * 5, [[0, 1]], [[3], [2, 0]], []],
]
"""By step and rank, the experts of each token."""


def train_both(
    rank: int, world: int, *, layout: dict[str, int], groups: dict[str, object] | None, kind: dict[str, Any]
) -> list[str]:
    """Steps on stock's side and ours; what differs."""
    fresh_parallel_state(**layout)
    ep = layout["ep"]
    sides = [build(megascale=False, ep=ep, **kind), build(megascale=True, ep=ep, poison=True, groups=groups, **kind)]
    found = []
    for step, routes_by_rank in enumerate(BY_RANK):
        routes: Routes = routes_by_rank[rank % 4]
        x_Th = tokens(len(routes), seed=10 * step + rank)
        first, second = (train(side, x_Th, routes) for side in sides)
        found += [f"step {step}: {name}" for name in differences(first, second, tolerance=1e-4)]
    return found


@pytest.mark.parametrize("groups", [None, {"move": "tokens"}], ids=["stock's dispatcher", "groups"])
@pytest.mark.parametrize(
    ("world", "layout", "kind"),
    [
        (2, {"tp": 2, "ep": 2, "etp": 1}, SEQUENCE),
        (2, {"cp": 2, "ep": 1}, CONTEXT),
        (2, {"cp": 2, "ep": 2}, {**CONTEXT, "distributed": True}),
        (4, {"tp": 2, "ep": 2, "etp": 1}, {**SEQUENCE, "gated": False}),
        (4, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}, {**SEQUENCE, **CONTEXT}),
    ],
    ids=lambda value: (
        "-".join(f"{k}{v}" for k, v in value.items() if "_" not in k) if isinstance(value, dict) else None
    ),
)
def test_steps_are_those_of_stock(pools, world, layout, kind, groups):
    assert pools[world].run(train_both, layout=layout, groups=groups, kind=kind) == [[]] * world
