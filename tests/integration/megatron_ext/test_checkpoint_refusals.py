"""Checkpoints that do not fit: one clear error on every rank, nothing of them loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    losses,
    trainer,
)
from tests.integration.megatron_ext.snapshots import State, differing, state_of

if TYPE_CHECKING:
    from scripts.moe_trainer.trainer import Trainer

MISFITS = {
    "--hidden-size 64": r"another shape: hidden_size 32 \(here 64\)",
    "--num-experts 8": r"another shape: num_experts 4 \(here 8\)",
    "--moe-ffn-hidden-size 96": r"another shape: moe_ffn_hidden_size 64 \(here 96\)",
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable": r"use_distributed_optimizer=False",
    "--bf16": r"bf16=False",
}
"""By the flags of the run that loads, what the error says; the checkpoint was saved with EP 2 in fp32."""


def saved_by(rank: int, world: int, *, corpus: str, options: str, megascale: bool, folder: str) -> str:
    """Saves after a step; returns the checkpoint's folder."""
    from scripts.moe_trainer import checkpointing

    with trainer(corpus, options, megascale=megascale) as run:
        losses(run, 1)
        return checkpointing.save(run, folder)


def load_into_misfits(rank: int, world: int, *, corpus: str, folder: str) -> dict[str, tuple[str, list[str]]]:
    """For each misfit, the error, and which tensors of the run that tried to load differ from before."""
    from scripts.moe_trainer import checkpointing
    from scripts.moe_trainer.errors import UsageError

    found: dict[str, tuple[str, list[str]]] = {}
    for options in MISFITS:
        with trainer(corpus, f"{GATED} {EXPERT_PARALLEL}", options, megascale=True) as run:
            losses(run, 1)
            before = state_of(run)
            with pytest.raises(UsageError) as error:
                checkpointing.load(run, folder)
            found[options] = (str(error.value), changed(before, run))
    return found


def changed(before: State, run: Trainer) -> list[str]:
    tensors, groups, position = state_of(run)
    names = differing(before[0], tensors)
    return names + ["groups"] * (groups != before[1]) + ["position"] * (position != before[2])


def test_a_checkpoint_of_another_shape_is_refused_on_every_rank_and_changes_nothing(pools, corpus, tmp_path):
    options = f"{GATED} {EXPERT_PARALLEL}"
    pools[2].run(saved_by, corpus=corpus, options=options, megascale=False, folder=str(tmp_path))
    first, second = pools[2].run(load_into_misfits, corpus=corpus, folder=str(tmp_path))
    assert first == second, "all ranks raise the same"
    for misfit, pattern in MISFITS.items():
        message, different = first[misfit]
        assert re.search(pattern, message), message
        assert different == [], misfit


def ask_for_other_layouts(rank: int, world: int, *, corpus: str) -> list[str]:
    messages = []
    with trainer(corpus, GATED, DISTRIBUTED_OPTIMIZER, megascale=True) as run:
        losses(run, 1)
        for metadata in ({"distrib_optim_sharding_type": "dp_reshardable"}, {}):
            with pytest.raises(ValueError, match="not supported with --megascale") as error:
                run.optimizer.sharded_state_dict({}, metadata=metadata)
            messages.append(str(error.value))
        with pytest.raises(ValueError, match="--ckpt-format torch is not supported") as error:
            run.optimizer.state_dict()
        with pytest.raises(RuntimeError, match="is_loading=True"):
            run.optimizer.load_state_dict({})
    return messages


def test_layouts_that_pages_cannot_have_are_refused_by_name(pools, corpus):
    (messages,) = pools[1].run(ask_for_other_layouts, corpus=corpus)
    assert "'dp_reshardable'" in messages[0]
    assert "'fully_sharded_model_space'" in messages[1]
    assert all("--dist-ckpt-optim-fully-reshardable" in message for message in messages)
