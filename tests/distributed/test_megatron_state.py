"""Parallel state made anew between the runs of one pool."""

import pytest
import torch

from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.pool import RanksRaised

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")


def sizes(rank: int, world: int, layout: dict[str, int]) -> dict[str, int | None]:
    from megatron.core import parallel_state

    fresh_parallel_state(**layout)
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "edp": parallel_state.get_expert_data_parallel_world_size(),
    }


def sum_in_expert_group(rank: int, world: int, layout: dict[str, int]) -> int:
    from megatron.core import parallel_state

    fresh_parallel_state(**layout)
    total = torch.tensor(rank + 1)
    torch.distributed.all_reduce(total, group=parallel_state.get_expert_model_parallel_group())
    return int(total)


def draw_from_trackers(rank: int, world: int, seed: int) -> tuple[float, float]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

    fresh_parallel_state(ep=world, seed=seed)
    with get_cuda_rng_tracker().fork():
        dense = float(torch.rand(()))
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        expert = float(torch.rand(()))
    return dense, expert


@pytest.mark.parametrize(
    ("world", "layout", "expected"),
    [
        (2, {"ep": 2}, {"tp": 1, "pp": 1, "vpp": None, "ep": 2, "dp": 2, "edp": 1}),
        (2, {"pp": 2, "vpp": 2}, {"tp": 1, "pp": 2, "vpp": 2, "ep": 1, "dp": 1, "edp": 1}),
        (2, {}, {"tp": 1, "pp": 1, "vpp": None, "ep": 1, "dp": 2, "edp": 2}),
        (4, {"ep": 2}, {"tp": 1, "pp": 1, "vpp": None, "ep": 2, "dp": 4, "edp": 2}),
        (4, {"ep": 2, "pp": 2}, {"tp": 1, "pp": 2, "vpp": None, "ep": 2, "dp": 2, "edp": 1}),
    ],
)
def test_layouts_follow_each_other_on_one_pool(pools, world, layout, expected):
    assert pools[world].run(sizes, layout=layout) == [expected] * world


def test_groups_of_a_new_layout_communicate(pools):
    assert pools[4].run(sum_in_expert_group, layout={"ep": 4}) == [10] * 4
    assert pools[4].run(sum_in_expert_group, layout={"ep": 2}) == [3, 3, 7, 7]


def test_rng_trackers_start_anew(pools):
    first = pools[2].run(draw_from_trackers, seed=7)
    assert first[0][0] == first[1][0], "ranks draw the same for dense weights"
    assert first[0][1] != first[1][1], "and differently for experts"
    assert pools[2].run(draw_from_trackers, seed=7) == first
    assert pools[2].run(draw_from_trackers, seed=8) != first


def test_a_layout_that_does_not_fit_is_refused_on_every_rank(pools):
    with pytest.raises(RanksRaised) as caught:
        pools[2].run(sizes, layout={"pp": 3})
    assert caught.value.ranks == [0, 1]
