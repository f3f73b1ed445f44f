"""DeepSpeed's checkpoints with experts in pages: saved, loaded, at other numbers of ranks, damaged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case
from scripts.deepspeed_runs.state import State
from tests.distributed.pool import Pools, RanksRaised
from tests.integration.deepspeed_ext import ranks

FEW_TOKENS = Case(family="olmoe", sequences=1, length=4, size=Size(experts=8, top_k=1, layers=1))


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_goes_on_bit_for_bit(pools: Pools, world: int, tmp_path: Path) -> None:
    kinds = ((0, False), (2, False), (3, True)) if world == 2 else ((0, False), (1, True))
    cases = [replace(FEW_TOKENS, stage=stage, bf16=bf16) for stage, bf16 in kinds]
    for outcome in pools[world].run(ranks.interrupted, cases=cases, folder=str(tmp_path)):
        for found in outcome:
            assert found["path"] is not None
            assert found["resumed"] == found["whole"]
            assert found["different"] == []


def test_another_number_of_ranks_and_another_cut(pools: Pools, tmp_path: Path) -> None:
    """8 experts divided among 2 ranks load where 4 ranks have 2 each, and where one has all; in smaller pages."""
    size = Size(experts=8, top_k=2, hidden=128, ffn=112, layers=1)
    case = Case(family="gpt_oss", steps=3, size=size, section={"expert_parallel_size": 2, "page_size_bytes": "128KiB"})
    before: State = pools[2].run(ranks.saved, case=case, folder=str(tmp_path))[0]
    for world in (1, 4):
        other = replace(case, section={"expert_parallel_size": world, "page_size_bytes": "64KiB"})
        for state in pools[world].run(ranks.loaded, case=other, folder=str(tmp_path)):
            assert ranks.differences(before, state) == []


def test_weights_alone(pools: Pools, tmp_path: Path) -> None:
    case = replace(FEW_TOKENS, stage=1, bf16=True)
    before: State = pools[1].run(ranks.saved, case=case, folder=str(tmp_path))[0]
    (state,) = pools[1].run(ranks.loaded, case=case, folder=str(tmp_path), optimizer_states=False)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert state[name]["weight"].equal(before[name]["weight"].bfloat16().float())
    assert not state[name]["exp_avg"].any()


@pytest.mark.parametrize("stage", [2, 3])
def test_fp32_weights_have_the_experts(pools: Pools, tmp_path: Path, stage: int) -> None:
    case = replace(FEW_TOKENS, stage=stage, bf16=True)
    before: State = pools[2].run(ranks.saved, case=case, folder=str(tmp_path))[0]
    (found,) = pools[1].run(ranks.fp32_of, folder=str(tmp_path))
    assert found.keys() >= before.keys()
    assert [name for name in before if not found[name].equal(before[name]["weight"])] == []
    assert "deepspeed_ext" in (tmp_path / "zero_to_fp32.py").read_text()
    pools[1].run(ranks.fp32_script, arguments=[str(tmp_path), str(tmp_path / "out"), "--max_shard_size", "20KB"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for file in set(index.values()):
        for name, tensor in load_file(tmp_path / "out" / file).items():
            assert index[name] == file
            assert tensor.equal(found[name])
    assert index.keys() == found.keys()


def test_damaged_files_are_refused_by_every_rank(pools: Pools, tmp_path: Path) -> None:
    pools[2].run(ranks.saved, case=FEW_TOKENS, folder=str(tmp_path))
    pages = tmp_path / "global_step3" / "megascale"
    part = next(pages.glob("pages-00001-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(bytes(content))
    with pytest.raises(RanksRaised, match="checksum does not match") as caught:
        pools[2].run(ranks.loaded, case=FEW_TOKENS, folder=str(tmp_path))
    assert caught.value.ranks == [0, 1]
    (pages / "manifest.json").unlink()
    with pytest.raises(RanksRaised, match="the checkpoint is not whole"):
        pools[1].run(ranks.loaded, case=FEW_TOKENS, folder=str(tmp_path))


def test_files_of_two_saves_are_never_loaded_together(pools: Pools, tmp_path: Path) -> None:
    for said in pools[2].run(ranks.saved_twice, case=replace(FEW_TOKENS, stage=3, bf16=True), folder=str(tmp_path)):
        full, load, fp32, changed, goes_on = said
        assert full == "no space left"
        assert all("a save of this checkpoint was interrupted" in message for message in (load, fp32))
        assert changed == goes_on == "0 tensors changed"


def test_another_model_is_refused(pools: Pools, tmp_path: Path) -> None:
    pools[1].run(ranks.saved, case=FEW_TOKENS, folder=str(tmp_path))
    other = replace(FEW_TOKENS, size=replace(FEW_TOKENS.size, experts=4))
    with pytest.raises(RanksRaised, match=r"size mismatch|has 8 experts"):
        pools[1].run(ranks.loaded, case=other, folder=str(tmp_path))
