"""Clipping by module (CMSA) under DeepSpeed: against plain PyTorch in one process, and against stock's clipping."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.deepspeed_runs.clipping import clipping_case
from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case
from tests.distributed.pool import Pools
from tests.integration.deepspeed_ext import clipping
from tests.integration.deepspeed_ext.test_beside_stock import FEW_TOKENS, offloaded

STAGES = (0, 1, 2, 3)
SMALL = Case(steps=2, clipping=0.02, size=Size(layers=1))
FP32_SUMS: dict[str, object] = {"data_types": {"grad_accum_dtype": "fp32"}}


def assert_together(pools: Pools, world: int, cases: list[Case]) -> None:
    clipped = [clipping_case(case) for case in cases]
    for outcome in pools[world].run(clipping.apart, cases=clipped):
        for case, (numbers, moments, where) in zip(clipped, outcome, strict=True):
            assert numbers <= 1e-6, f"{case}: {numbers:.3g}"
            assert moments <= 1e-5, f"{case}: {moments:.3g} at {where}"


def test_every_stage_finds_what_one_process_would(pools: Pools) -> None:
    cases = [replace(SMALL, stage=stage) for stage in STAGES]
    cases += [replace(SMALL, stage=stage, extra=offloaded(stage)) for stage in (1, 3)]
    cases.append(replace(SMALL, stage=2, accumulation=2))
    assert_together(pools, 2, cases)


def test_experts_divided_on_disk_or_without_tokens(pools: Pools, tmp_path: Path) -> None:
    """Pages of experts without tokens do not count, as parameters of zeros do not; on every rank alike."""
    few = replace(FEW_TOKENS, clipping=0.02, steps=2)
    divided = [replace(few, stage=stage, section={"expert_parallel_size": 2}) for stage in (0, 2)]
    assert_together(pools, 2, [replace(few, stage=1), *divided])
    section = {"device_budget": "25%", "disk_path": str(tmp_path), "page_size_bytes": 65536}
    size = Size(experts=16, top_k=1, ffn=128, hidden=128, layers=3)
    assert_together(pools, 1, [replace(few, size=size, section=section)])


def test_one_module_and_alpha_0_are_stocks_bits(pools: Pools) -> None:
    cases = [replace(SMALL, stage=stage, bf16=bf16) for bf16 in (False, True) for stage in STAGES]
    cases += [replace(SMALL, stage=1, bf16=True, extra=FP32_SUMS), replace(SMALL, stage=2, extra=offloaded(2))]
    for outcome in pools[2].run(clipping.one_module_beside_stock, cases=cases):
        for case, different in zip(cases, outcome, strict=True):
            assert different == [], f"ZeRO {case.stage}, bf16 {case.bf16}"


def test_a_step_that_is_not_finite_is_left_out_by_all(pools: Pools) -> None:
    """On one rank one element is NaN: of a dense parameter, or what enters the experts backwards."""
    kinds = [(0, False), (0, True), (1, True), (2, False), (3, False)]
    for clip, places in (({}, ("lm_head", "mlp.experts")), ({"mode": "stock", "nonfinite": "skip"}, ("lm_head",))):
        cases = [
            (clipping_case(replace(SMALL, stage=stage, bf16=bf16), **clip), place)
            for stage, bf16 in kinds
            for place in places
        ]
        outcomes = pools[2].run(clipping.spoiled, cases=cases)
        for rank, outcome in enumerate(outcomes):
            for (case, place), (different, skipped, lines) in zip(cases, outcome, strict=True):
                assert (different, skipped) == ([], 1), f"ZeRO {case.stage}, bf16 {case.bf16}, {place}"
                assert len(lines) == (rank == 0)
                # What goes wrong behind the experts has reached everything before them.
                assert not lines or ("experts_0" if "experts" in place else place) in lines[0], lines


def test_a_fit_goes_on_from_a_checkpoint(pools: Pools, tmp_path: Path) -> None:
    case = clipping_case(replace(SMALL, stage=2), alpha="auto")
    for outcome in pools[2].run(clipping.calibrated, case=case, folder=str(tmp_path)):
        assert outcome["same"]
        assert outcome["stages"] == ["fitting"] * 5 + ["fixed"] * 2
        assert len(set(outcome["alphas"][4:])) == 1


@pytest.mark.parametrize("kind", ["frozen", "absent"])
def test_models_without_experts_are_clipped_too(pools: Pools, kind: str) -> None:
    """An encoder that is frozen, or that a batch does not reach."""
    for found in pools[2].run(clipping.dense_apart, kind=kind, stages=list(STAGES if kind == "frozen" else STAGES[:3])):
        assert max(found) <= 1e-6, found
    if kind == "frozen":  # what a batch does not reach is stepped by its last gradient again, see below
        for found in pools[2].run(clipping.dense_apart, kind=kind, stages=[2], offload=True):
            assert max(found) <= 1e-6, found


@pytest.mark.parametrize(("stage", "offload"), [(3, False), (2, True)])
def test_what_zero_would_step_by_is_what_is_clipped(pools: Pools, stage: int, offload: bool) -> None:
    """The last gradient of parameters that a step does not reach is stepped by again; on the CPU the clipped one."""
    for with_images, without in pools[2].run(clipping.encoder_norms, stage=stage, offload=offload):
        assert 0 < without < with_images if offload else without == with_images > 0


def test_ranks_that_hold_nothing_join(pools: Pools) -> None:
    for found in pools[4].run(clipping.dense_apart, kind="tiny", stages=[1, 2, 3]):
        assert max(found) <= 1e-6, found


MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"mode": "cmsa", "unclipped": True}, "CMSA needs a clipping norm above 0"),
    ({"mode": "cmsa", "mpus": {"vision*": "encoder"}}, "no parameter matches 'vision*'"),
    ({"mode": "cmsa", "mpus": {"*gate_up_proj": "a", "*": "b"}}, "divides the experts of model.layers.0.mlp.experts"),
    ({"mode": "cmsa", "mpus": "FILE"}, "cannot be read"),
    ({"mode": "cmsa", "alpha": 2}, "alpha=2"),
    ({"mode": "cmsa", "bse": 1.0}, "did you mean clip.base"),
]


def test_mistakes_are_said_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    clips = [clip for clip, _ in MISTAKES]
    for answers in pools[2].run(clipping.refusals, clips=clips, folder=str(tmp_path)):
        for answer, (_, expected) in zip(answers, MISTAKES, strict=True):
            assert re.search(re.escape(expected), answer), f"{expected}: {answer}"
