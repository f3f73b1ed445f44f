"""Experts whose pages are spread over ranks, saved and resumed under other layouts, in both formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.megatron_lm_runs.stored import different
from tests.integration.megatron_ext.runs import GATED, NO_DROPOUT, largest_relative_difference, write_corpus
from tests.integration.megatron_ext.stored import contents
from tests.integration.megatron_ext.stored import different as paged_different
from tests.integration.megatron_ext.test_other_expert_parallel_sizes import passed_on, saved_after_steps
from tests.integration.megatron_ext.test_paged_checkpoints import PAGED, SPARSE, load_and_save, run_and_save

SPREAD = (
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --moe-token-dispatcher-type allgather "
    "--moe-ffn-hidden-size 320"
)
WHOLE = "--moe-ffn-hidden-size 320"
"""As many neurons that a page of the smallest size holds half of them, and neither layout cuts otherwise."""
GROUPS = "--megascale-dispatcher groups"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_pages_come_together_and_are_spread_again(pools, corpus, tmp_path):
    common = f"{GATED} {SPARSE} {PAGED} --megascale-page-size 64KiB"
    spread, whole = f"{SPREAD} {GROUPS} {common}", f"{WHOLE} {common}"
    one, two, three = (str(tmp_path / name) for name in ("spread", "whole", "again"))
    pools[4].run(run_and_save, corpus=corpus, options=spread, folder=one)
    pools[1].run(load_and_save, corpus=corpus, options=whole, source=one, target=two)
    pools[4].run(load_and_save, corpus=corpus, options=spread, source=two, target=three)
    held = contents(one)
    assert any(name.endswith("moment2") for name in held)
    assert paged_different(held, contents(two)) == []
    assert paged_different(held, contents(three)) == []


def test_stock_saves_we_go_on_and_stock_goes_on(pools, corpus, tmp_path):
    common = f"{GATED} {NO_DROPOUT}"
    first, second, third = (str(tmp_path / name) for name in ("stock", "ours", "whole"))
    options = f"{common} {SPREAD}"
    pools[4].run(saved_after_steps, corpus=corpus, options=options, folder=first, megascale=False, steps=2)
    ours = pools[4].run(
        passed_on, corpus=corpus, options=f"{options} {GROUPS}", source=first, target=second, megascale=True
    )
    by_stock = pools[4].run(passed_on, corpus=corpus, options=options, source=second, target=third, megascale=False)
    for one, two in ((first, second), (second, third)):
        assert different(Path(one) / "iter_0000002", Path(two) / "iter_0000002") == []
    assert largest_relative_difference(by_stock[0][0], ours[0][0]) <= 1e-6
