"""Checkpoints in stock's format at another expert-parallel size: every bit arrives, where stock itself gives up."""

from __future__ import annotations

import pytest

from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    losses,
    trainer,
)

MODEL = f"{GATED} {NO_DROPOUT}"
FORMS = {"fp32": "", "float16": "--bf16", "distributed": f"--bf16 {DISTRIBUTED_OPTIMIZER}"}
LAYOUTS = {1: "", 2: EXPERT_PARALLEL}


def saved_after_steps(
    rank: int, world: int, *, corpus: str, options: str, folder: str, megascale: bool, steps: int
) -> list[float]:
    """Trains and saves; the losses."""
    from scripts.moe_trainer import checkpointing

    with trainer(corpus, options, megascale=megascale) as run:
        found = losses(run, steps)
        checkpointing.save(run, folder)
        return found


def passed_on(
    rank: int, world: int, *, corpus: str, options: str, source: str, target: str, megascale: bool
) -> list[float]:
    """Loads, saves what was loaded, goes on; the losses."""
    from scripts.moe_trainer import checkpointing

    with trainer(corpus, options, megascale=megascale) as run:
        checkpointing.load(run, source)
        checkpointing.save(run, target)
        return losses(run, 2)


def different_tensors(rank: int, world: int, *, first: str, second: str) -> list[str]:
    """Names of the stored tensors (dense, experts, masters, moments) whose bits differ, whole."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    from tests.integration.megatron_ext.snapshots import differing

    one, two = (load_plain_tensors(folder) for folder in (first, second))
    assert any("exp_avg_sq" in name and "experts" in name for name in one)
    return differing(one, two)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("saved_at", [1, 2])
def test_every_bit_arrives_and_stock_goes_on(pools, corpus, tmp_path, form, saved_at):
    there, here = (f"{MODEL} {LAYOUTS[size]} {FORMS[form]}" for size in (saved_at, 3 - saved_at))
    first, second, third = (str(tmp_path / name) for name in ("stock", "resharded", "back"))
    pools[2].run(saved_after_steps, corpus=corpus, options=there, folder=first, megascale=False, steps=2)
    going_on = pools[2].run(passed_on, corpus=corpus, options=here, source=first, target=second, megascale=True)
    by_stock = pools[2].run(passed_on, corpus=corpus, options=here, source=second, target=third, megascale=False)
    step = "iter_0000002"
    pairs = [(first, second), (second, third)]
    for one, two in pairs:
        same = pools[1].run(different_tensors, first=f"{one}/{step}", second=f"{two}/{step}")
        assert same == [[]], (one, two)
    assert going_on[0] == pytest.approx(by_stock[0], rel=2e-4 if "bf16" in FORMS[form] else 1e-5)
