"""Optimizers and parameter lists that hold experts already, and models that fit the section or not."""

import re

import pytest

from tests.distributed.pool import Pools
from tests.integration.deepspeed_ext import lists


@pytest.mark.parametrize("way", ["list", "groups", "optimizer", "function", "generator", "named", "offloaded"])
def test_experts_keep_the_settings_of_their_group(pools: Pools, way: str) -> None:
    (found,) = pools[1].run(lists.deviation, way=way)
    assert found["update"] <= 1e-5
    assert found["gradient"] <= 1e-5


REFUSED = {
    "experts_alone": "parameter group 1 has experts only",
    "one_module_in_two_groups": "the experts of a module share one group",
    "stepped": "the optimizer has state of model.layers.0",
    "sgd": "optimizer SGD is not supported",
    "amsgrad": "amsgrad is not supported",
    "amsgrad_of_a_group": "amsgrad is not supported",
    "list_of_experts": "model_parameters has experts only",
    "rest_is_frozen": "nothing but experts trains, .* ZeRO 1 needs",
    "no_folder": 'is not a folder; create it, or give another "disk_path"',
    "dense": "has no experts that can be paged",
    "bf16_model": 'add "bf16"',
    "ranks": "expert_parallel_size=3 does not divide",
    "budget": '"device_budget": [0-9]+ or more',
    "clip": "no/such/file.json",
    "clip_base": "CMSA needs a clipping norm above 0",
}


def test_what_cannot_be_is_refused_by_name(pools: Pools) -> None:
    (found,) = pools[1].run(lists.refusals, ways=list(REFUSED))
    for message, expected in zip(found, REFUSED.values(), strict=True):
        assert re.search(expected, message), f"{expected}: {message}"


def test_what_one_rank_cannot_do_is_refused_by_all(pools: Pools) -> None:
    ways = ["no_folder", "budget", "stepped"]
    first, second = pools[2].run(lists.refusals_of_one_rank, ways=ways)
    assert first == second
    for message, way in zip(first, ways, strict=True):
        assert re.search(rf"{REFUSED[way]}.*\(rank 1\)$", message, re.DOTALL), f"{way}: {message}"


def test_frozen_experts_stay_what_they_are(pools: Pools) -> None:
    (found,) = pools[1].run(lists.frozen)
    assert found == {"experts moved": False, "rest moved": True, "paged": True}


def test_sixty_experts_on_two_ranks(pools: Pools) -> None:
    assert pools[2].run(lists.owned, experts=60) == [list(range(30)), list(range(30, 60))]


def test_zero_grad_drops_what_it_drops_of_stock(pools: Pools) -> None:
    """Between the micro-batches of a step, after its only one, and after a backward that was interrupted."""
    (found,) = pools[1].run(lists.after_zero_grad)
    for case, difference in found.items():
        assert difference <= 1e-6, case


def test_without_a_section_and_after_disable_the_engine_is_stocks(pools: Pools) -> None:
    (names,) = pools[1].run(lists.engines)
    assert names == ["DeepSpeedEngine", "MegaScaleEngine", "DeepSpeedEngine"]


def test_loops_that_are_not_a_forward_and_a_backward_each(pools: Pools) -> None:
    """Two losses in one backward, a boundary set by hand, and nothing but experts that train."""
    ways = ["two_losses", "boundary_by_hand", "rest_is_frozen"]
    (found,) = pools[1].run(lists.loops, ways=ways)
    for way, (difference, done) in zip(ways, found, strict=True):
        assert difference <= 1e-6, way
        assert done > 0, f"{way}: no gradient was completed in a backward"
