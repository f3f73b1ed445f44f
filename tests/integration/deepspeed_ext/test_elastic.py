"""Checkpoints in the project's own format load under another ZeRO stage and on another number of ranks, to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveRequest
from scripts.deepspeed_runs.clipping import clipping_case
from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case
from tests.distributed.pool import Pools, RanksRaised
from tests.integration.deepspeed_ext import ranks
from tests.integration.megatron_ext.stored import contents, different

FEW_TOKENS = Case(family="olmoe", sequences=1, length=4, size=Size(experts=8, top_k=1, layers=1))


@pytest.mark.parametrize(
    ("world", "stage", "other_world", "other_stage", "bf16"),
    [(2, 1, 2, 3, True), (4, 2, 3, 3, True), (1, 0, 2, 1, False)],
    ids=["zero1-to-3", "zero2-of-4-ranks-to-3-of-3", "no-zero-to-zero1"],
)
def test_another_stage_and_number_of_ranks(
    pools: Pools, tmp_path: Path, world: int, stage: int, other_world: int, other_stage: int, bf16: bool
) -> None:
    case = replace(FEW_TOKENS, stage=stage, bf16=bf16)
    case = clipping_case(case, alpha="auto") if bf16 else case
    before, _, clipping = pools[world].run(ranks.saved_elastic, case=case, folder=str(tmp_path))[0]
    assert (clipping is not None) == bf16
    other = replace(case, stage=other_stage)
    for state, _, told in pools[other_world].run(ranks.loaded_elastic, case=other, folder=str(tmp_path)):
        assert ranks.differences(before, state) == []
        assert told == ({"epoch": 7}, 3, clipping)
    opened = Checkpointer(tmp_path).open()
    assert opened is not None
    assert {"megascale", "deepspeed", "transformers", "configuration"} <= opened.manifest.versions.keys()
    assert opened.manifest.configuration["deepspeed"].get("zero_optimization", {}).get("stage", 0) == stage
    assert opened.manifest.configuration["model"]["model_type"] == "olmoe"


def test_the_same_layout_goes_on_to_the_bit(pools: Pools, tmp_path: Path) -> None:
    case = replace(FEW_TOKENS, stage=3, bf16=True)
    saved = pools[2].run(ranks.saved_elastic, case=case, folder=str(tmp_path))
    loaded = pools[2].run(ranks.loaded_elastic, case=case, folder=str(tmp_path))
    assert [losses for _, losses, _ in loaded] == [losses for _, losses, _ in saved]


def test_a_run_that_freezes_hands_the_state_on(pools: Pools, tmp_path: Path) -> None:
    case, one, other = replace(FEW_TOKENS, stage=2, bf16=True), str(tmp_path / "one"), str(tmp_path / "other")
    pools[2].run(ranks.saved_elastic, case=case, folder=one)
    pools[2].run(
        ranks.handed_on_by_a_run_that_freezes, case=replace(case, stage=3), folder=one, target=other, name="q_proj"
    )
    held = contents(one)
    assert any(name.startswith("optimizer.exp_avg_sq.") and "q_proj" in name for name in held)
    assert different(held, contents(other)) == []


def test_a_checkpoint_of_another_framework_is_refused_by_every_rank(pools: Pools, tmp_path: Path) -> None:
    request = SaveRequest(tag="t", step=1, values={"run": {}, "schedule": None, "optimizer": True, "rng": True})
    Checkpointer(tmp_path).save(RankState([]), request)
    with pytest.raises(RanksRaised, match=r"was not saved by a DeepSpeed run .*it has no client, position") as caught:
        pools[2].run(ranks.loaded_elastic, case=replace(FEW_TOKENS, stage=1), folder=str(tmp_path))
    assert caught.value.ranks == [0, 1]


def test_another_model_is_refused_by_every_rank(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(ranks.saved_elastic, case=replace(FEW_TOKENS, stage=1), folder=str(tmp_path))
    other = replace(FEW_TOKENS, stage=1, size=replace(FEW_TOKENS.size, experts=4))
    with pytest.raises(RanksRaised, match=r"has 8 experts|the model needs") as caught:
        pools[2].run(ranks.loaded_elastic, case=other, folder=str(tmp_path))
    assert caught.value.ranks == [0, 1]
