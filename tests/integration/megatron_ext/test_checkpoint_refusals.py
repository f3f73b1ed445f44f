"""Checkpoints that do not fit: one clear error on every rank, nothing of them loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from unittest import mock

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
    "--expert-model-parallel-size 1": r"expert_model_parallel_size=2, here it is 1.*--no-load-optim",
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


def load_unchecked(rank: int, world: int, *, corpus: str, options: str, folder: str) -> tuple[str, list[str]]:
    """What the adapter itself says where the script does not compare expert parallel sizes, as Megatron-LM does not."""
    from scripts.moe_trainer import checkpointing

    with trainer(corpus, options, megascale=True) as run:
        losses(run, 1)
        before = state_of(run)
        with mock.patch.object(checkpointing, "check_shape"), pytest.raises(ValueError) as error:
            checkpointing.load(run, folder)
        # Weights are loaded before the optimizer is asked (in fp32 they are the masters), and stock reads dense moments
        # straight into the optimizer; experts' state, steps and groups are the adapter's to keep.
        read = ("weight ",) if run.args.bf16 else ("weight ", "master ")
        names = changed(before, run)
        return str(error.value), [
            name for name in names if not name.startswith(read) and (" " not in name or ".experts." in name)
        ]


def test_a_checkpoint_of_another_shape_is_refused_on_every_rank_and_changes_nothing(pools, corpus, tmp_path):
    options = f"{GATED} {EXPERT_PARALLEL}"
    pools[2].run(saved_by, corpus=corpus, options=options, megascale=False, folder=str(tmp_path))
    first, second = pools[2].run(load_into_misfits, corpus=corpus, folder=str(tmp_path))
    assert first == second, "all ranks raise the same"
    for misfit, pattern in MISFITS.items():
        message, different = first[misfit]
        assert re.search(pattern, message), message
        assert different == [], misfit


@pytest.mark.parametrize(
    ("saved_with_ep", "form"),
    [(1, "--bf16"), (1, DISTRIBUTED_OPTIMIZER), (2, ""), (2, "--bf16")],
    ids=["ep1-bf16", "ep1-distributed", "ep2-fp32", "ep2-bf16"],
)
def test_optimizer_state_of_another_ep_is_refused_by_the_adapter_too(pools, corpus, tmp_path, form, saved_with_ep):
    with_ep, without = f"{GATED} {EXPERT_PARALLEL} {form}", f"{GATED} {form}"
    saved, loading = (with_ep, without) if saved_with_ep == 2 else (without, with_ep)
    pools[2].run(saved_by, corpus=corpus, options=saved, megascale=saved_with_ep == 2, folder=str(tmp_path))
    answers = pools[2].run(load_unchecked, corpus=corpus, options=loading, folder=str(tmp_path))
    for message, different in answers:
        assert "saved at another --expert-model-parallel-size" in message
        assert "--no-load-optim" in message
        assert different == []


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
