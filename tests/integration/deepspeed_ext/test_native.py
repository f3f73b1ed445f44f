"""DeepSpeed's own MoE layers with experts in pages, ZeRO 3 included, which stock refuses."""

import pytest

from tests.distributed.pool import Pools, RanksRaised
from tests.integration.deepspeed_ext import native


@pytest.mark.parametrize(("world", "ep_size", "kind"), [(1, 1, "swiglu"), (2, 2, "gelu")])
def test_losses_are_stocks(pools: Pools, world: int, ep_size: int, kind: str) -> None:
    stages = [0, 1, 2, 3]
    for found in pools[world].run(native.beside_stock, stages=stages, kind=kind, ep_size=ep_size):
        for stage, (stock, paged) in zip(stages, found, strict=True):
            assert paged == pytest.approx(stock, rel=1e-5), f"ZeRO {stage}"
            assert stock[-1] < 0.9 * stock[0]


def test_losses_in_bf16_are_near_stocks(pools: Pools) -> None:
    (found,) = pools[1].run(native.beside_stock, stages=[0, 1, 3], kind="swiglu", ep_size=1, bf16=True)
    for stock, paged in found:
        assert paged == pytest.approx(stock, rel=1e-2)
        assert stock[-1] < 0.9 * stock[0]


def test_groups_of_experts_are_clipped_as_one_group_is(pools: Pools) -> None:
    """Experts divided among two ranks, or all on each."""
    stages = [0, 2, 3]
    together = pools[2].run(native.modules_of, stages=stages, ep_size=1)
    divided = pools[2].run(native.modules_of, stages=stages, ep_size=2)
    for outcome in (*together, *divided):
        for found in outcome:
            assert found.keys() == together[0][0].keys() >= {"embedding", "dense_0", "experts_0"}
            for name, numbers in found.items():
                assert numbers == pytest.approx(together[0][0][name], rel=1e-6), name


@pytest.mark.parametrize("kind", ["swiglu"])
def test_names_values_and_checkpoints(pools: Pools, kind: str) -> None:
    assert pools[1].run(native.states, kind=kind) == [[True, True]]


def test_an_expert_that_pages_do_not_compute_is_refused(pools: Pools) -> None:
    with pytest.raises(RanksRaised, match=r"layers\.1.*an expert of class Sequential is not one that pages"):
        pools[1].run(native.refused)
