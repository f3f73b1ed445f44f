"""Models that are built, loaded and published with their experts in pages."""

from pathlib import Path

import pytest

from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case
from tests.distributed.pool import Pools
from tests.integration.deepspeed_ext import building


@pytest.mark.parametrize(("family", "stage"), [("mixtral", 3), ("gpt_oss", 1)])
def test_loaded_in_pages_is_loaded_the_same(pools: Pools, tmp_path: Path, family: str, stage: int) -> None:
    case = Case(family=family, stage=stage, size=Size(experts=4))
    pools[1].run(building.publish, case=case, folder=str(tmp_path))
    for different in pools[2].run(building.loaded_both_ways, case=case, folder=str(tmp_path)):
        assert different == []


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_random_weights_are_stocks(pools: Pools, family: str) -> None:
    (different,) = pools[1].run(building.initialised_both_ways, case=Case(family=family, size=Size(experts=4)))
    assert different == []


def test_a_model_that_zero_has_partitioned(pools: Pools) -> None:
    assert pools[2].run(building.zero_init, case=Case(size=Size(experts=4))) == [True, True]


def test_experts_that_move_take_one_layer_more(pools: Pools) -> None:
    assert 5.5 < pools[1].run(building.moving, layers=5)[0] < 6.1


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_plain_checkpoint(pools: Pools, tmp_path: Path, family: str) -> None:
    """Under ZeRO 3, and with experts divided among ranks without it."""
    cases = [
        Case(family=family, stage=3, bf16=True, size=Size(experts=5)),
        Case(family=family, size=Size(experts=5), section={"expert_parallel_size": 2}),
    ]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        assert pools[2].run(building.exported, case=case, folder=str(folder)) == [[], []]
        assert (folder / "config.json").exists()
        assert not list(folder.glob("*.new"))


def test_blocks_that_cannot_be(pools: Pools, tmp_path: Path) -> None:
    (said,) = pools[1].run(building.refusals, folder=str(tmp_path))
    expected = [
        "broken.json cannot be read: Expecting",
        "missing.json cannot be read: ",
        'bf16.enabled="auto" is not known yet',
        "2 models with experts (MixtralForCausalLM, MixtralForCausalLM) were built in one",
        *2 * ["deepspeed.zero.Init and deepspeed_ext.init cannot both build a model"],
        "model.layers.0.mlp.experts: experts in pages cannot be copied",
    ]
    for message, part in zip(said, expected, strict=True):
        assert part in message
