"""Stock DeepSpeed and the megascale section beside each other: every step begins with stock's state on both sides."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case, Deviations
from tests.distributed import pool
from tests.distributed.pool import Pools, RanksDied
from tests.integration.deepspeed_ext import ranks

BOUNDS = {"routing": 0.0, "loss": 1e-6, "norm": 1e-6, "gradient": 1e-5, "second moment": 1e-5, "update": 1e-5}
STAGES = (0, 1, 2, 3)
# One sequence of four tokens a rank and one expert a token: on every rank most experts go without.
FEW_TOKENS = Case(family="olmoe", steps=3, sequences=1, length=4, size=Size(experts=16, top_k=1))


def assert_exact(found: Deviations, case: Case) -> None:
    for kind, bound in BOUNDS.items():
        if kind in found.worst:
            assert found.worst[kind] <= bound, f"{case}: {kind} {found.worst[kind]:.3g} at {found.where[kind]}"
    assert {"routing", "loss", "gradient", "second moment", "update"} <= found.worst.keys()


def assert_within_control(case: Case, found: Deviations, control: Deviations) -> None:
    for kind in ("loss", "norm", "gradient", "second moment", "update"):
        if kind in found.worst:
            bound = 2 * max(control.worst[kind], 1e-6)
            assert found.worst[kind] <= bound, f"{case}: {kind} {found.worst[kind]:.3g}, control {bound / 2:.3g}"


def prove(pools: Pools, world: int, cases: list[Case]) -> list[list[Deviations]]:
    outcomes: list[list[Deviations]] = pools[world].run(ranks.prove_cases, cases=cases)
    for outcome in outcomes:
        for case, found in zip(cases, outcome, strict=True):
            assert_exact(found, case)
    return outcomes


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_is_exact(pools: Pools, world: int) -> None:
    cases = [Case(family=family, stage=stage, steps=2) for family in ("mixtral", "qwen3_moe") for stage in STAGES]
    for outcome in prove(pools, world, cases):
        assert all(max(found.norms) > 0.5 for found in outcome if "norm" in found.worst), "nothing was clipped"


def test_every_family_is_exact(pools: Pools) -> None:
    families = (("olmoe", 1), ("deepseek_v3", 3), ("gpt_oss", 2))
    cases = [Case(family=family, stage=stage, steps=2) for family, stage in families]
    prove(pools, 2, cases)


def test_accumulation_and_the_eager_implementation(pools: Pools) -> None:
    cases = [Case(stage=s, accumulation=2, steps=2, experts_implementation="eager") for s in (0, 3)]
    prove(pools, 2, cases)


def test_an_optimizer_on_the_cpu_for_the_rest(pools: Pools) -> None:
    prove(pools, 2, [Case(stage=s, steps=1, extra=offloaded(s)) for s in (2, 3)])


def offloaded(stage: int) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}


def test_kernels_read_tokens_by_index_and_weight_what_they_sum(pools: Pools) -> None:
    small = Case(steps=1, sequences=1, length=4, size=Size(layers=1, experts=4, hidden=16, ffn=16))
    small = replace(small, family="mixtral", section={"backend": "triton"})
    cases = [small, replace(small, experts_implementation="eager"), replace(small, bf16=True)]
    (*found, called) = pools[1].run(ranks.prove_with_kernels, cases=cases)[0]
    assert called == ["unpermute", "weight_gradient", "sum_by_token"]
    for case, (deviations, control) in zip(cases, found, strict=True):
        if control is None:
            assert_exact(deviations, case)
        else:
            assert_within_control(case, deviations, control)


def test_experts_that_no_token_of_a_rank_reaches(pools: Pools) -> None:
    outcomes = prove(pools, 2, [replace(FEW_TOKENS, stage=stage) for stage in STAGES])
    for stage in range(len(STAGES)):
        hit = [outcome[stage].experts_hit for outcome in outcomes]
        assert any(a != b for a, b in zip(*hit, strict=True)), "ranks reached the same experts at every step"
        assert max(len(one) for one in hit[0]) < FEW_TOKENS.size.experts


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 3)])
def test_a_quarter_of_the_memory(pools: Pools, world: int, stage: int, tmp_path: Path) -> None:
    section = {"device_budget": "25%", "disk_path": str(tmp_path), "page_size_bytes": 65536}
    if world == 1:
        section |= {"host_budget": "50%", "optimizer_device": "host"}
    size = Size(experts=16, top_k=1, ffn=128, hidden=128, layers=3)
    cases = [replace(FEW_TOKENS, stage=stage, steps=2, size=size, section=section)]
    for outcome in prove(pools, world, cases):
        for found in outcome:
            assert found.page_stats["bytes_loaded"] > 0
            assert (found.page_stats.get("pages_stepped_in_host", 0) > 0) == (world == 1)
            assert found.page_stats["resident_bytes"] <= 0.27 * found.page_stats["all_bytes"]


def test_experts_divided_among_ranks(pools: Pools) -> None:
    cases = [
        Case(family=family, stage=stage, steps=2, section={"expert_parallel_size": 2}, size=Size(experts=7))
        for family, stage in (("mixtral", 0), ("gpt_oss", 2), ("mixtral", 3))
    ]
    prove(pools, 2, cases)


def test_a_rank_that_died_is_named(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward: a layer's forward has exchanged rows twice, and there are two layers."""
    monkeypatch.setattr(pool, "GRACE_AFTER_DEATH_SECONDS", 30.0)  # the others answer long before
    case = Case(stage=2, section={"expert_parallel_size": 3}, size=Size(experts=6))
    with pytest.raises(RanksDied, match="rank 2 with exit code 7 died") as caught:
        pools[3].run(ranks.lose_a_rank, case=case, dead=2, exchanges=5)
    for rank in (0, 1):
        assert f"rank {rank}: exchanging rows of tokens failed: ranks [2] do not answer" in str(caught.value)


def test_half_precision_deviates_no_more_than_stock_from_itself(pools: Pools) -> None:
    """The control is stock with the other one of its two ways to compute experts."""
    small = Case(bf16=True, steps=1, size=Size(layers=1))
    cases = [replace(small, stage=stage, accumulation=2) for stage in (0, 3)]
    cases.append(replace(small, stage=1, extra={"data_types": {"grad_accum_dtype": "fp32"}}))
    outcomes = pools[2].run(ranks.prove_cases, cases=cases, control=True)
    for outcome in outcomes:
        for case, (found, control) in zip(cases, outcome, strict=True):
            assert_within_control(case, found, control)


def test_a_wrong_gradient_is_caught(pools: Pools) -> None:
    (found,) = pools[2].run(ranks.prove_cases, cases=[Case(stage=3, steps=2)], mutate=True)[0]
    assert found.worst["gradient"] > 10 * BOUNDS["gradient"]
    assert "layers.0.mlp.experts" in found.where["gradient"]
