"""``megascale checkpoint convert`` from and to DeepSpeed's own files, and from a Megatron run to a DeepSpeed one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megascale_omni import cli
from megascale_omni.checkpoint.checkpointer import Checkpointer
from megascale_omni.checkpoint.hf_view import hf_view
from megascale_omni.paging.planes import Plane
from scripts.deepspeed_runs.clipping import clipping_case
from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case
from scripts.deepspeed_runs.state import State
from tests.distributed.pool import Pools
from tests.integration.deepspeed_ext import ranks
from tests.integration.megatron_ext.runs import EXPERT_PARALLEL, write_corpus

SPARSE = Case(family="qwen3_moe", sequences=1, length=4, size=Size(experts=8, top_k=1, layers=1), bf16=True)


def convert(*words: object) -> None:
    assert cli.main(["checkpoint", "convert", *map(str, words)]) == 0


@pytest.mark.parametrize(
    ("world", "stage", "other_world", "other_stage", "bf16"),
    [(1, 1, 2, 3, True), (2, 2, 1, 3, False), (2, 3, 2, 1, True)],
    ids=["zero1-to-3-of-2-ranks", "zero2-of-2-ranks-fp32-to-3", "zero3-of-2-ranks-to-1"],
)
def test_stocks_files_there_and_back(
    pools: Pools, tmp_path: Path, world: int, stage: int, other_world: int, other_stage: int, bf16: bool
) -> None:
    """Stock saves; another stage loads it in pages, and stock loads what that saved, as its universal format."""
    case = replace(SPARSE, stage=stage, bf16=bf16)
    before = pools[world].run(ranks.saved_by_stock, case=case, folder=str(tmp_path / "stock"))[0]
    assert all({"exp_avg", "exp_avg_sq"} <= kinds.keys() for kinds in before.values())
    convert(tmp_path / "stock", tmp_path / "paged", "--to", "paged", "--page-size", "64KiB", "--style", "hf")
    other = replace(case, stage=other_stage)
    for state, _, told in pools[other_world].run(ranks.loaded_elastic, case=other, folder=str(tmp_path / "paged")):
        assert ranks.differences(before, state) == []
        assert told == ({"epoch": 7}, 3, None)
    convert(tmp_path / "paged", tmp_path / "universal", "--to", "deepspeed")
    for state, told in pools[other_world].run(ranks.loaded_universal, case=other, folder=str(tmp_path / "universal")):
        assert ranks.differences(before, state) == []
        assert told == (7, 3, 2)


def test_files_of_a_run_with_experts_in_pages(pools: Pools, tmp_path: Path) -> None:
    """What ``engine.save_checkpoint`` wrote, DeepSpeed's files and pages beside them, on another number of ranks."""
    case = clipping_case(replace(SPARSE, stage=2), alpha="auto")
    before = pools[2].run(ranks.saved, case=case, folder=str(tmp_path / "saved"))[0]
    convert(tmp_path / "saved", tmp_path / "paged", "--to", "paged")
    ((state, _, told),) = pools[1].run(
        ranks.loaded_elastic, case=replace(case, stage=3), folder=str(tmp_path / "paged")
    )
    assert ranks.differences(before, state) == []
    assert told[:2] == ({}, 3)
    assert "'step': 3" in told[2]


MODEL = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --num-attention-heads 4 --qk-layernorm --attention-dropout 0 "
    "--hidden-dropout 0 --moe-aux-loss-coeff 0 --make-vocab-size-divisible-by 1 --megascale-checkpoint-format paged"
)
SAME_MODEL = Case(
    family="qwen3_moe", stage=2, size=Size(vocabulary=256, hidden=32, ffn=64, heads=4, groups=2, experts=4)
)


def test_a_megatron_run_goes_on_under_deepspeed(pools: Pools, tmp_path: Path) -> None:
    """From two expert-parallel ranks to two of ZeRO 2, with the same loss: every row is where it belongs. And back."""
    corpus, folder, options = write_corpus(tmp_path), str(tmp_path / "megatron"), f"{MODEL} {EXPERT_PARALLEL}"
    saved = pools[2].run(ranks.saved_by_megatron, corpus=corpus, options=options, folder=folder)
    convert(folder, tmp_path / "hf", "--to", "paged", "--names", "hf")
    batches = [batch for _, of_rank in saved for batch in of_rank]
    expected = expected_state(folder)
    for state, loss, position, lr in pools[2].run(
        ranks.goes_on_from_megatron, case=SAME_MODEL, folder=str(tmp_path / "hf"), batches=batches
    ):
        assert ranks.differences(expected, state) == []
        assert loss == pytest.approx(saved[0][0][0], rel=1e-5)
        assert position == (3, 24, 3)
        assert lr == pytest.approx(3e-3 * math.log(3) / math.log(4))  # WarmupLR's own, at its third step
    convert(tmp_path / "hf", tmp_path / "back", "--to", "paged", "--names", "megatron", "--like", folder)
    for again in pools[2].run(
        ranks.goes_on_under_megatron, corpus=corpus, options=options, folder=str(tmp_path / "back")
    ):
        assert again == saved[0][0], "to the bit"


def test_pages_behind_and_masters_of_a_megatron_run(pools: Pools, tmp_path: Path) -> None:
    """Few tokens for many experts in bf16: steps that pages have missed are made on the way."""
    options = f"{MODEL} --bf16 --num-experts 16 --moe-router-topk 1 --moe-router-pre-softmax --global-batch-size 2"
    corpus, folder = write_corpus(tmp_path), str(tmp_path / "megatron")
    pools[1].run(ranks.saved_by_megatron, corpus=corpus, options=options, folder=folder)
    opened = Checkpointer(folder).open()
    assert opened is not None
    assert any(page.last_step < 3 for pages in opened.pages.pages.values() for page in pages)
    convert(folder, tmp_path / "hf", "--to", "paged", "--names", "hf")
    case = replace(SAME_MODEL, stage=1, bf16=True, size=replace(SAME_MODEL.size, experts=16, top_k=1))
    for state, *_ in pools[2].run(ranks.goes_on_from_megatron, case=case, folder=str(tmp_path / "hf"), batches=[]):
        assert ranks.differences(expected_state(folder), state) == []


def expected_state(folder: str) -> State:
    """What a checkpoint has, fused and cut by the map that tests/unit/checkpoint/test_model_names.py proves."""
    opened = Checkpointer(folder).open()
    assert opened is not None
    view = hf_view(opened)
    kinds = {"exp_avg": "optimizer.exp_avg.", "exp_avg_sq": "optimizer.exp_avg_sq."}
    masters = any(name.startswith("optimizer.param.") for name in view.dense)
    kinds["weight"] = "optimizer.param." if masters else "model."
    state: State = {
        name.removeprefix("model."): {kind: view.dense[prefix + name[6:]].read() for kind, prefix in kinds.items()}
        for name in view.dense
        if name.startswith("model.")
    }
    planes = {"weight": Plane.MASTER, "exp_avg": Plane.MOMENT1, "exp_avg_sq": Plane.MOMENT2}
    for path in view.modules:
        for kind, plane in planes.items():
            for name, source in view.experts(path, plane):
                state.setdefault(f"{path}.{name}", {})[kind] = source.read()
    return state
