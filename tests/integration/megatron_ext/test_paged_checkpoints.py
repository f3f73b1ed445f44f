"""Megatron runs saved in the project's own format: any layout loads what any other saved, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveRequest
from megascale_omni.checkpoint.manifest import verify
from megascale_omni.checkpoint.store import list_checkpoints
from tests.distributed.pool import RanksRaised
from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    losses,
    trainer,
    write_corpus,
)
from tests.integration.megatron_ext.stored import contents, different

PAGED = "--megascale-checkpoint-format paged"
EP4 = "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
SPARSE = (
    "--moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 0"  # few tokens an expert: pages fall behind
)
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run_and_save(rank: int, world: int, *, corpus: str, options: str, folder: str, more: int = 0) -> list[float]:
    with trainer(corpus, options, f"--save {folder}", megascale=True) as run:
        losses(run, STEPS)
        run.save()
        run.finish_saves()
        return losses(run, more)


def load_and_save(
    rank: int, world: int, *, corpus: str, options: str, source: str, target: str, more: int = 0
) -> tuple[list[float], tuple[int, int, float]]:
    with trainer(corpus, options, f"--load {source} --save {target}", megascale=True) as run:
        position = run.iteration, run.consumed_samples, run.learning_rate
        run.save()
        run.finish_saves()
        return losses(run, more), position


def go_on_and_save(rank: int, world: int, *, corpus: str, options: str, folder: str) -> None:
    with trainer(corpus, options, f"--load {folder} --save {folder}", megascale=True) as run:
        losses(run, 1)
        run.save()
        run.finish_saves()


def carried(root: str) -> dict[str, Any]:
    """What a checkpoint has beside tensors that any layout must have alike, as texts: NaN is not equal to itself."""
    opened = Checkpointer(root).open()
    assert opened is not None
    manifest, names = opened.manifest, ("schedule", "clipping", "paging_step")
    assert {"megascale", "torch", "megatron-core", "configuration"} <= manifest.versions.keys()
    assert manifest.configuration["model"]["num_moe_experts"] == 4
    assert manifest.configuration["megascale"]["checkpoint"]["format"] == "paged"
    assert manifest.values["schedule"]["num_steps"] > 0
    return {name: repr(manifest.values[name]) for name in names}


def moved(
    pools: Any, corpus: str, tmp_path, first: tuple[int, str], second: tuple[int, str], common: str, batch: int = 8
) -> None:
    """What ``first`` saves, ``second`` loads and saves again; both hold the same."""
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    pools[first[0]].run(run_and_save, corpus=corpus, options=f"{first[1]} {common}", folder=one)
    results = pools[second[0]].run(
        load_and_save, corpus=corpus, options=f"{second[1]} {common}", source=one, target=other
    )
    assert {position[:2] for _, position in results} == {(STEPS, STEPS * batch)}
    assert carried(one) == carried(other)
    held = contents(one)
    assert any(name.startswith("optimizer.exp_avg.") for name in held)
    assert any(name.endswith("moment2") for name in held)
    assert different(held, contents(other)) == []


@pytest.mark.parametrize(
    ("second", "options"),
    [(1, ""), (4, EP4), (2, "--pipeline-model-parallel-size 2"), (4, "")],
    ids=["ep1", "ep4", "pp2", "dp4"],
)
def test_ep2_dp2_loads_anywhere(pools, corpus, tmp_path, second, options):
    first = (4, EXPERT_PARALLEL)
    moved(pools, corpus, tmp_path, first, (second, options), f"{GATED} {SPARSE} {PAGED}")


def test_a_data_parallel_rank_less(pools, corpus, tmp_path):
    """Flat shards of four ranks as those of three, and what clipping by module has measured."""
    common = f"--bf16 {DISTRIBUTED_OPTIMIZER} --global-batch-size 12 --micro-batch-size 1 --megascale-clip cmsa {PAGED}"
    moved(pools, corpus, tmp_path, (4, ""), (3, ""), common, batch=12)


def test_distributed_optimizer_and_bf16_and_back(pools, corpus, tmp_path):
    """ZeRO-like shards of flat buffers into whole parameters; the pages caught up, because shards defer nothing."""
    common = f"--bf16 {PAGED} --megascale-max-lag 0"
    moved(pools, corpus, tmp_path, (2, DISTRIBUTED_OPTIMIZER), (1, ""), common)
    moved(pools, corpus, tmp_path / "back", (1, ""), (2, DISTRIBUTED_OPTIMIZER), common)


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, "--bf16"), (2, f"{EXPERT_PARALLEL} --megascale-checkpoint-beside on"), (2, DISTRIBUTED_OPTIMIZER)],
)
def test_a_resumed_run_goes_on_to_the_bit(pools, corpus, tmp_path, world, options):
    """Dropout on: random numbers go on, too."""
    one, other, options = str(tmp_path / "one"), str(tmp_path / "other"), f"{options} {SPARSE} {PAGED}"
    straight = pools[world].run(run_and_save, corpus=corpus, options=options, folder=one, more=4)
    resumed = pools[world].run(load_and_save, corpus=corpus, options=options, source=one, target=other, more=4)
    assert [found for found, _ in resumed] == straight


def test_increments_go_on_where_a_run_is_resumed(pools, corpus, tmp_path):
    """A run counts on from the checkpoint that it loaded, and its first save refers to that."""
    folder = str(tmp_path / "run")
    few = "--num-experts 32 --micro-batch-size 1 --global-batch-size 1"  # 16 tokens: most experts have none
    options = f"{SPARSE} {few} {PAGED} --megascale-checkpoint-full-every 2"
    pools[1].run(run_and_save, corpus=corpus, options=options, folder=folder)
    for _ in range(2):
        pools[1].run(go_on_and_save, corpus=corpus, options=options, folder=folder)
    found, broken = list_checkpoints(tmp_path / "run")
    assert not broken
    kinds = [(f.manifest.step, f.manifest.values["saves_since_full"], bool(f.manifest.needs)) for f in found]
    assert kinds == [(6, 0, False), (5, 1, True), (4, 0, False)]
    assert [verify(f.folder) for f in found] == [[]] * 3


def test_a_checkpoint_of_another_framework_is_refused(pools, corpus, tmp_path):
    request = SaveRequest(tag="t", step=1, values={"run": {}, "client": {}, "groups": []})
    Checkpointer(tmp_path / "theirs").save(RankState([]), request)
    with pytest.raises(RanksRaised, match="was not saved by a Megatron run: it has no schedule, optimizer, rng"):
        pools[2].run(
            load_and_save, corpus=corpus, options=PAGED, source=str(tmp_path / "theirs"), target=str(tmp_path / "mine")
        )


def test_stock_format_becomes_ours_and_ours_becomes_stocks(pools, corpus, tmp_path):
    """Both are read where they are found; the flag says what is written."""
    stock, ours, back = (str(tmp_path / name) for name in ("stock", "ours", "back"))
    options = f"{NO_DROPOUT} {SPARSE}"
    straight = pools[1].run(run_and_save, corpus=corpus, options=options, folder=stock, more=3)
    pools[1].run(load_and_save, corpus=corpus, options=f"{options} {PAGED}", source=stock, target=ours)
    pools[1].run(load_and_save, corpus=corpus, options=options, source=ours, target=back)
    ((found, _),) = pools[1].run(
        load_and_save, corpus=corpus, options=options, source=back, target=str(tmp_path / "end"), more=3
    )
    assert [found] == straight
