"""A few steps of the exactness proof: one rank and EP2, with control and mutant. `prove_exactness.py` does the rest."""

from pathlib import Path

import pytest

from scripts.exactness.deviations import BOUNDS
from scripts.exactness.layouts import MEGASCALE_FLAGS, Layout, select
from scripts.exactness.verdict import Verdict, judge_free, judge_mutant, judge_steps
from scripts.measuring.corpus import standard_library_corpus

PROVED_STEPS, MUTATED_STEPS, FREE_STEPS = 4, 1, 4


def prove_on_rank(rank, world, *, flags):
    """Everything that a rank does, for a pool."""
    from scripts.exactness.proof import Proof

    proof = Proof(rank, world, flags=flags, megascale_flags=MEGASCALE_FLAGS)
    try:
        initial = proof.open()
        proved = proof.prove(PROVED_STEPS)
        mutated = proof.mutate(MUTATED_STEPS)
        again = proof.open()
        free = proof.run_free(FREE_STEPS)
        return initial + again, proved, mutated, free
    finally:
        proof.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standard_library_corpus(tmp_path_factory.mktemp("corpus"), max_bytes=100_000)


def verdict_of(pools, layout: Layout, corpus: Path) -> Verdict:
    by_rank = pools[layout.ranks].run(
        prove_on_rank, flags=layout.flags(data_path=corpus, steps=PROVED_STEPS + MUTATED_STEPS)
    )
    initial, proved, mutated, free = (list(part) for part in zip(*by_rank, strict=True))
    return Verdict(
        layout=layout,
        steps=PROVED_STEPS,
        seconds=0.0,
        initial_differences=[text for found in initial for text in found],
        mutant=judge_mutant(mutated),
        free=judge_free(free[0], []),
        **judge_steps(proved),
    )


@pytest.mark.parametrize("layout", select("recompute_full,ep2"), ids=lambda layout: layout.name)
def test_megascale_steps_as_stock_does(pools, layout, corpus):
    found = verdict_of(pools, layout, corpus)
    assert found.initial_differences == []
    assert found.megascale is not None
    assert set(found.megascale) == set(BOUNDS)
    for kind, worst in found.megascale.items():
        assert worst.share <= 1, f"{kind} of megascale: {worst}"
    assert found.control is not None
    for kind, worst in found.control.items():
        assert worst.share <= 1, f"{kind} of the control: {worst}"
    # The control sums in another order: a comparison that finds no difference there compares nothing.
    assert found.control["gradient"].value > 0
    assert found.mutant is not None
    assert found.mutant.caught, found.mutant
    assert found.free is not None
    assert found.free_share <= 1
