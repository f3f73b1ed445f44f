"""Megatron runs saved in the project's own format: any layout loads what any other saved, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megascale_omni.checkpoint.boxes import Box
from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveRequest
from megascale_omni.checkpoint.manifest import verify
from megascale_omni.checkpoint.store import list_checkpoints
from tests.distributed.pool import RanksRaised
from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    changed_experts,
    losses,
    trainer,
    write_corpus,
)
from tests.integration.megatron_ext.snapshots import tensors_of
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


@contextmanager
def changed_parameters(trained: Callable[[str], bool]) -> Iterator[None]:
    """Trainers built meanwhile freeze dense parameters whose names are not ``trained``."""
    from scripts.moe_trainer import model

    build = model._build_chunk

    def build_and_freeze(*arguments: Any) -> Any:
        chunk = build(*arguments)
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and trained(name))
        return chunk

    with mock.patch.object(model, "_build_chunk", build_and_freeze):
        yield


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
    one = str(tmp_path / "one")
    pools[first[0]].run(run_and_save, corpus=corpus, options=f"{first[1]} {common}", folder=one)
    handed_on(pools, corpus, one, str(tmp_path / "other"), (second[0], f"{second[1]} {common}"), batch)


def handed_on(pools: Any, corpus: str, one: str, other: str, second: tuple[int, str], batch: int = 8) -> None:
    """``second`` loads and saves again what is in folder ``one``; both hold the same."""
    results = pools[second[0]].run(load_and_save, corpus=corpus, options=second[1], source=one, target=other)
    assert {position[:2] for _, position in results} == {(STEPS, STEPS * batch)}
    assert carried(one) == carried(other)
    held = contents(one)
    assert any(name.startswith("optimizer.exp_avg.") for name in held)
    assert any(name.endswith("moment2") for name in held)
    assert different(held, contents(other)) == []


@pytest.fixture(scope="module")
def ep2_dp2(pools, corpus, tmp_path_factory) -> str:
    """A folder with what a run of EP 2 x DP 2 has saved."""
    folder, options = str(tmp_path_factory.mktemp("ep2dp2")), f"{EXPERT_PARALLEL} {GATED} {SPARSE} {PAGED}"
    pools[4].run(run_and_save, corpus=corpus, options=options, folder=folder)
    return folder


@pytest.mark.parametrize(
    ("second", "options"),
    [(1, ""), (4, EP4), (2, "--pipeline-model-parallel-size 2"), (4, "")],
    ids=["ep1", "ep4", "pp2", "dp4"],
)
def test_ep2_dp2_loads_anywhere(pools, corpus, tmp_path, ep2_dp2, second, options):
    handed_on(pools, corpus, ep2_dp2, str(tmp_path), (second, f"{options} {GATED} {SPARSE} {PAGED}"))


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


def freeze_the_first(experts: torch.nn.Module, index: int) -> None:
    experts.requires_grad_(index != 0)


def goes_on_with_a_part_frozen(rank: int, world: int, *, corpus: str, options: str, source: str, target: str) -> None:
    """The first layer, its experts, and the router of the second are not stepped."""
    with (
        changed_experts(freeze_the_first),
        changed_parameters(lambda name: "layers.0." not in name and "layers.1.mlp.router" not in name),
        trainer(corpus, options, f"--load {source} --save {target}", megascale=True) as run,
    ):
        losses(run, 2)
        run.save()


def by_layer(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is stored, with the tensors in which stock stacks layers cut into those."""
    found = {}
    for name, tensor in held.items():
        kind, stacked, rest = name.partition(".decoder.layers.")
        for layer, part in enumerate(tensor) if stacked else ():
            found[f"{kind}.decoder.layers.{layer}.{rest}"] = part
        if not stacked:
            found[name] = tensor
    return found


def test_what_is_frozen_for_a_while_keeps_its_state(pools, corpus, tmp_path):
    """Dense parameters under flat shards, and experts: moments and masters wait in the checkpoints between."""
    first, frozen, last = (str(tmp_path / name) for name in ("first", "frozen", "last"))
    options = f"--bf16 {DISTRIBUTED_OPTIMIZER} {SPARSE} {PAGED}"
    pools[2].run(run_and_save, corpus=corpus, options=options, folder=first)
    pools[2].run(goes_on_with_a_part_frozen, corpus=corpus, options=options, source=first, target=frozen)
    pools[2].run(load_and_save, corpus=corpus, options=options, source=frozen, target=last, more=1)
    before, between, after = (by_layer(contents(folder)) for folder in (first, frozen, last))
    still = {name for name in before if "layers.0." in name or ".mlp.router" in name}
    still = {name for name in still if "last_step" not in name}
    assert {name.split(".")[1] for name in still if name.startswith("optimizer.")} == {
        "param", "exp_avg", "exp_avg_sq", "step",
    }  # fmt: skip
    assert any(name.endswith("moment2") for name in still)
    assert before.keys() == between.keys() == after.keys()
    changed = set(different(before, between))
    assert not changed & still, "what was frozen has changed"
    assert any(name.startswith("optimizer.exp_avg.") for name in changed), "what was not frozen has not"
    assert different(between, after) == []


def begins_with_a_part_frozen(rank: int, world: int, *, corpus: str, options: str, folder: str) -> None:
    with (
        changed_parameters(lambda name: "layers.0." not in name),
        trainer(corpus, options, f"--save {folder}", megascale=True) as run,
    ):
        losses(run, 2)
        run.save()


@pytest.mark.parametrize("optimizer", ["", DISTRIBUTED_OPTIMIZER], ids=["whole", "sharded"])
def test_what_was_frozen_from_the_beginning_begins_with_nothing(pools, corpus, tmp_path, optimizer):
    options, one, other = f"--bf16 {optimizer} {PAGED}", str(tmp_path / "one"), str(tmp_path / "other")
    pools[1].run(begins_with_a_part_frozen, corpus=corpus, options=options, folder=one)
    pools[1].run(load_and_save, corpus=corpus, options=options, source=one, target=other, more=1)
    opened = Checkpointer(other).open()
    assert opened is not None
    names = [n for n in opened.dense.tensors if n.startswith("optimizer.param.decoder.layers.") and "norm" not in n]
    assert len(names) > 3
    for name in names:
        shape = opened.dense.tensors[name][0].global_shape
        first, second = (Box((layer, *(0,) * (len(shape) - 1)), (1, *shape[1:])) for layer in (0, 1))
        moment = name.replace("param", "exp_avg", 1)
        assert opened.dense.holds(moment, second)
        assert not opened.dense.holds(moment, first, all_of_it=False), "as if it had never been stepped"
        weight = opened.dense.read(name.replace("optimizer.param", "model"), first)
        assert torch.equal(opened.dense.read(name, first), weight.float())
        with pytest.raises(ValueError, match=r"does not have all of optimizer\.exp_avg"):
            opened.dense.read(moment)


def masters_and_weights(rank: int, world: int, *, corpus: str, options: str, folder: str) -> list[str]:
    """Masters that are not their weights after a load without the optimizer, and whether moments are there."""
    with trainer(corpus, options, f"--load {folder} --no-load-optim --no-load-rng", megascale=True) as run:
        found = tensors_of(run)
        masters = {name.removeprefix("master "): t for name, t in found.items() if name.startswith("master ")}
        assert len(masters) > 10
        return [name for name, master in masters.items() if not torch.equal(master, found[f"weight {name}"].float())]


def test_weights_alone_make_the_masters(pools, corpus, tmp_path):
    options = f"{GATED} {EXPERT_PARALLEL} --bf16 {SPARSE} {PAGED}"
    pools[2].run(run_and_save, corpus=corpus, options=options, folder=str(tmp_path))
    found = pools[2].run(masters_and_weights, corpus=corpus, options=options, folder=str(tmp_path))
    assert found == [[], []]


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
