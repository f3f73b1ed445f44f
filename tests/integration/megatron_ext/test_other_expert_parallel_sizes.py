"""Checkpoints in stock's format at another expert-parallel size: every bit arrives, where stock itself gives up."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from scripts.megatron_lm_runs.stored import different
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
) -> tuple[list[float], int]:
    """Loads, saves what was loaded, goes on; the losses, and how many of the loaded tensors were joined in place."""
    from megatron_ext import spared_copies
    from scripts.moe_trainer import checkpointing

    with (
        trainer(corpus, options, megascale=megascale) as run,
        patch.object(spared_copies, "in_one_piece", wraps=spared_copies.in_one_piece) as joined,
    ):
        checkpointing.load(run, source)
        checkpointing.save(run, target)
        return losses(run, 2), joined.call_count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("saved_at", [1, 2])
def test_every_bit_arrives_and_stock_goes_on(pools, corpus, tmp_path, form, saved_at):
    there, here = (f"{MODEL} {LAYOUTS[size]} {FORMS[form]}" for size in (saved_at, 3 - saved_at))
    first, second, third = (str(tmp_path / name) for name in ("stock", "resharded", "back"))
    pools[2].run(saved_after_steps, corpus=corpus, options=there, folder=first, megascale=False, steps=2)
    going_on = pools[2].run(passed_on, corpus=corpus, options=here, source=first, target=second, megascale=True)
    by_stock = pools[2].run(passed_on, corpus=corpus, options=here, source=second, target=third, megascale=False)
    for one, two in ((first, second), (second, third)):
        assert different(Path(one) / "iter_0000002", Path(two) / "iter_0000002") == []
    (on, joined), (stocks, never) = going_on[0], by_stock[0]
    assert on == pytest.approx(stocks, rel=2e-4 if "bf16" in FORMS[form] else 1e-5)
    assert (joined > 0, never) == (True, 0), "gate and up, without copies"


LARGE = "--hidden-size 64 --moe-ffn-hidden-size 1024 --num-experts 16 --num-layers 4 --seq-length 16"
LAYER_BYTES = 16 * 3 * 64 * 1024 * 4
"""Weights of a layer's experts; masters are the weights, and each moment is as large."""


def private_memory_of_an_export(rank: int, world: int, *, corpus: str, folder: str | None) -> int:
    """How much private memory stock's view of the whole state takes, beside the pages."""
    from megatron_ext import patches
    from scripts.moe_trainer import checkpointing
    from tests.unit.checkpoint.test_scratch import private_bytes

    with trainer(corpus, f"{GATED} {LARGE}", megascale=True) as run:
        losses(run, 1)
        patches.active_runtime().export.folder = folder
        before = private_bytes()
        state = checkpointing._state_dict(run, checkpointing._content_metadata(run.args), loading=False)
        taken = private_bytes() - before
        assert state["optimizer"]
        return taken


def test_stocks_view_of_the_experts_is_in_a_file(pools, corpus, tmp_path):
    (mapped,) = pools[1].run(private_memory_of_an_export, corpus=corpus, folder=str(tmp_path))
    (copied,) = pools[1].run(private_memory_of_an_export, corpus=corpus, folder=None)
    assert copied > 2 * 4 * LAYER_BYTES, "the measure sees copies: weights and two moments of four layers"
    assert mapped < LAYER_BYTES
    assert list(tmp_path.iterdir()) == []
