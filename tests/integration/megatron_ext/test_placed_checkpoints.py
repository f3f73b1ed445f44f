"""Runs under a placement, and runs whose pages come on demand, saved and resumed under other settings."""

from __future__ import annotations

import pytest

from megascale_omni.topology.placement import Placement
from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    largest_relative_difference,
    losses,
    trainer,
    write_corpus,
)
from tests.integration.megatron_ext.test_paged_checkpoints import PAGED, SPARSE, moved

GROUPS = "--megascale-dispatcher groups"
ON_DEMAND = f"{DISTRIBUTED_OPTIMIZER} --megascale-fetch demand"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def placements(tmp_path_factory) -> dict[str, str]:
    """Flags by name: two placements, each with other experts together in each of the two layers."""
    folder = tmp_path_factory.mktemp("placements")
    slots = {"one": [((0, 3), (1, 2)), ((2, 1), (3, 0))], "other": [((1, 0), (2, 3)), ((0, 2), (1, 3))]}
    found = {}
    for name, (first, second) in slots.items():
        Placement({"1": first, "2": second}).write(folder / f"{name}.json")
        found[name] = f"{GROUPS} --megascale-placement {folder / f'{name}.json'}"
    return found


@pytest.mark.parametrize("second", ["other", "ep1"])
def test_a_placed_run_is_resumed_under_another_placement_or_none(pools, corpus, tmp_path, placements, second):
    first = (4, f"{EXPERT_PARALLEL} {placements['one']}")
    then = (1, "") if second == "ep1" else (2, f"{EXPERT_PARALLEL} {placements[second]}")
    moved(pools, corpus, tmp_path, first, then, f"{GATED} {SPARSE} {PAGED}")


def test_pages_that_wait_for_demand_are_saved_and_loaded_as_they_are(pools, corpus, tmp_path):
    moved(pools, corpus, tmp_path, (2, ON_DEMAND), (1, ""), f"{SPARSE} {PAGED}")
    moved(pools, corpus, tmp_path / "bf16", (2, ON_DEMAND), (2, ON_DEMAND), f"--bf16 {SPARSE} {PAGED}")


def pass_on(rank: int, world: int, *, corpus: str, folder: str, ours: str, common: str) -> dict[str, list[float]]:
    """Losses of stock in one piece; of a MegaScale run that saves in stock's format; and of stock resuming that."""
    with trainer(corpus, common, megascale=False) as stock:
        straight = losses(stock, 5)
    with trainer(corpus, common, ours, f"--save {folder}", megascale=True) as run:
        found = losses(run, 3)
        run.save()
        run.finish_saves()
        found += losses(run, 2)
    with trainer(corpus, common, f"--load {folder}", megascale=False) as stock:
        back = losses(stock, 2)
    with trainer(corpus, common, ours, f"--load {folder}", megascale=True) as run:
        again = losses(run, 2)
    return {"straight": straight, "ours": found, "back": back, "again": again}


@pytest.mark.parametrize("case", ["placed", "on demand"])
def test_stock_goes_on_where_a_placed_run_or_one_on_demand_saved(pools, corpus, tmp_path, placements, case):
    """Initial weights are stock's, expert by expert, wherever they are."""
    ours = placements["one"] if case == "placed" else "--megascale-fetch demand"
    common = f"{GATED} {NO_DROPOUT} {EXPERT_PARALLEL}"
    common += f" {DISTRIBUTED_OPTIMIZER}" if case == "on demand" else ""
    world = 4 if case == "on demand" else 2
    for found in pools[world].run(
        pass_on, corpus=corpus, folder=str(tmp_path), ours=ours, common=common, timeout_seconds=90.0
    ):
        for name, steps in {"ours": slice(0, 5), "back": slice(3, 5), "again": slice(3, 5)}.items():
            assert largest_relative_difference(found["straight"][steps], found[name]) <= 1e-6, name
