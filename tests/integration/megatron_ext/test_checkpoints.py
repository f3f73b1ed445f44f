"""Checkpoints in stock's format, in both directions: what one side saved the other continues, bit for bit where it can.

A run of stock saves, MegaScale continues and saves, stock and MegaScale continue that; every named tensor, every
setting and every later loss is compared, and the two sides' checkpoints with each other. Dropout is on, so that random
numbers must continue too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from megascale_omni.paging.planes import Plane
from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    changed_experts,
    expert_overrides,
    largest_relative_difference,
    losses_and_norms,
    paged_modules,
    trainer,
)
from tests.integration.megatron_ext.snapshots import (
    State,
    differing,
    groups_of,
    position_of,
    state_of,
    stored_common,
    stored_keys,
    tensors_of,
)

if TYPE_CHECKING:
    import torch

    from scripts.moe_trainer.trainer import Trainer

SAVED_WITH = "--adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6"
"""Settings of parameter groups that come back with a checkpoint, whatever the flags of the run that continues."""
INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
MOSTLY_IDLE = "--num-experts 32 --moe-router-topk 1 --moe-router-pre-softmax --micro-batch-size 1 --global-batch-size 2"
"""So few tokens that most experts get none; their pages have steps to make up for when they are saved."""
BF16_LOSS_TOLERANCE = 1e-4
"""A bf16 product has 8 bits: where sums are ordered otherwise, losses differ by more than rounding of the loss."""


def freeze(experts: torch.nn.Module, index: int) -> None:
    experts.requires_grad_(False)


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "frozen experts": lambda: changed_experts(freeze),
    "groups of experts": lambda: expert_overrides({"wd_mult": 0.5, "max_lr": 3e-3, "min_lr": 2e-5}),
}


class Differences:
    """Collects what should be equal and is not, under a name."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def of_values(self, name: str, first: object, second: object) -> None:
        if first != second:
            self.found[name] = (first, second)

    def of_tensors(self, name: str, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
        assert first, name
        if different := differing(first, second):
            self.found[name] = f"{len(different)} of {len(first)} tensors, e.g. {different[:3]}"

    def of_losses(
        self, name: str, first: list[tuple[float, Any]], second: list[tuple[float, Any]], bound: float
    ) -> None:
        difference = largest_relative_difference([loss for loss, _ in first], [loss for loss, _ in second])
        if not difference <= bound:
            self.found[name] = difference

    def of_states(self, name: str, first: State, second: State) -> None:
        self.of_tensors(f"{name}: tensors", first[0], second[0])
        self.of_values(f"{name}: parameter groups", first[1], second[1])
        self.of_values(f"{name}: position", first[2], second[2])


def switch_sides(
    rank: int, world: int, *, corpus: str, folder: str, options: str, pages: str, variant: str
) -> tuple[dict[str, object], int, int]:
    """Stock -> MegaScale -> stock and MegaScale.

    Returns what differs, the most pages of an expert, and how many pages were behind when MegaScale saved.
    """
    from scripts.moe_trainer import checkpointing

    def side(*, megascale: bool, load: str = "", more: str = "") -> Trainer:
        where = f"--load {folder}/{load}" if load else ""
        return trainer(corpus, options, pages if megascale else "", where, more, megascale=megascale)

    differences = Differences()
    bound = BF16_LOSS_TOLERANCE if "--bf16" in options else 1e-6
    with VARIANTS[variant]():
        with side(megascale=False, more=SAVED_WITH) as stock:
            losses_and_norms(stock, 2)
            saved = state_of(stock)
            checkpointing.save(stock, f"{folder}/stock")
            uninterrupted = losses_and_norms(stock, 1)
            by_stock = checkpointing.save(stock, f"{folder}/stock")
            uninterrupted += losses_and_norms(stock, 1)

        with side(megascale=True, load="stock --ckpt-step 2") as paged:
            slices = max(module.layout.num_slices for module in paged_modules(paged))
            if variant != "frozen experts":  # which have no optimizer that could know
                at = {module.manager.schedule.moment.step for module in paged_modules(paged)}
                differences.of_values("stock -> MegaScale: steps that reports go on with", {2}, at)
            differences.of_states("stock -> MegaScale", saved, state_of(paged))
            continued = losses_and_norms(paged, 1)
            late = pages_behind(paged)
            by_pages = checkpointing.save(paged, f"{folder}/paged")
            saved = state_of(paged)
            continued += losses_and_norms(paged, 1)
            end = tensors_of(paged)
            paged.args.ckpt_step = None
            checkpointing.load(paged, f"{folder}/paged")
            differences.of_tensors("MegaScale -> itself, later", saved[0], tensors_of(paged))
        differences.of_losses("stock -> MegaScale: losses", uninterrupted, continued, bound)
        differences.of_values("format: tensors and objects", stored_keys(by_stock), stored_keys(by_pages))
        differences.of_values("format: everything else", stored_common(by_stock), stored_common(by_pages))

        with side(megascale=False, load="paged") as stock:
            differences.of_states("MegaScale -> stock", saved, state_of(stock))
            back = losses_and_norms(stock, 1)
        differences.of_losses("MegaScale -> stock: losses", uninterrupted[1:], back, bound)

        with side(megascale=True, load="paged") as paged:
            # Nothing is read in between: pages must not take steps for missed that the checkpoint has in it.
            differences.of_values("MegaScale -> MegaScale: position", saved[1:], (groups_of(paged), position_of(paged)))
            differences.of_values("MegaScale -> MegaScale: losses", continued[1:], losses_and_norms(paged, 1))
            differences.of_tensors("MegaScale -> MegaScale: end", end, tensors_of(paged))
    return differences.found, slices, late


def pages_behind(run: Trainer) -> int:
    """Weight pages that have not seen every step yet."""
    adam = run.optimizer.paged.adam
    late = 0
    for module in adam.modules:
        ids = module.manager.ids(module.pages, Plane.WEIGHT, range(module.num_experts))
        late += int((module.manager.table.last_step[ids] < adam.num_steps).sum())
    return late


@pytest.mark.parametrize(
    ("world", "options", "pages", "slices", "variant"),
    [
        pytest.param(1, "--ffn-hidden-size 320", "--megascale-page-size 64KiB", 2, "", id="biases-pages"),
        pytest.param(1, f"{GATED} --bf16 {DISTRIBUTED_OPTIMIZER}", "", 1, "", id="bf16-distributed"),
        pytest.param(2, f"{GATED} {EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}", "", 1, "", id="ep2-distributed"),
        pytest.param(2, f"{EXPERT_PARALLEL} --bf16", "", 1, "", id="ep2-bf16-biases"),
        pytest.param(2, f"--bf16 {DISTRIBUTED_OPTIMIZER}", "", 1, "", id="dp2-bf16-distributed-biases"),
        pytest.param(1, f"{MOSTLY_IDLE} {GATED} --bf16", "", 1, "", id="idle-experts-bf16"),
        pytest.param(2, f"{MOSTLY_IDLE} {EXPERT_PARALLEL}", "", 1, "", id="ep2-idle-experts-biases"),
        pytest.param(2, f"{GATED} {INTERLEAVED}", "", 1, "", id="interleaved-pp2"),
        pytest.param(4, f"{GATED} {EXPERT_PARALLEL}", "", 1, "", id="ep2dp2"),
        pytest.param(
            4, f"{GATED} {EXPERT_PARALLEL} --bf16 {DISTRIBUTED_OPTIMIZER}", "", 1, "", id="ep2dp2-bf16-distributed"
        ),
        pytest.param(1, "--bf16", "", 1, "groups of experts", id="groups-of-experts-bf16"),
        pytest.param(2, f"{GATED} {EXPERT_PARALLEL} --bf16", "", 1, "frozen experts", id="ep2-bf16-frozen-experts"),
    ],
)
def test_each_side_continues_what_the_other_saved(pools, corpus, tmp_path, world, options, pages, slices, variant):
    answers = pools[world].run(
        switch_sides, corpus=corpus, folder=str(tmp_path), options=options, pages=pages, variant=variant
    )
    assert [(found, most) for found, most, _ in answers] == [({}, slices)] * world
    if options.startswith(MOSTLY_IDLE):
        assert all(late > 0 for _, _, late in answers), "every expert got tokens: nothing was behind"


def weights_alone(rank: int, world: int, *, corpus: str, folder: str, saved: str, loaded: str) -> dict[str, object]:
    """Both sides take the weights of stock's checkpoint without its optimizer. Returns what differs."""
    from scripts.moe_trainer import checkpointing

    differences = Differences()
    with trainer(corpus, saved) as stock:
        losses_and_norms(stock, 2)
        checkpointing.save(stock, folder)
    sides = []
    for megascale in (False, True):
        with trainer(corpus, loaded, f"--load {folder} --no-load-optim --no-load-rng", megascale=megascale) as run:
            tensors = {name: t for name, t in tensors_of(run).items() if name.startswith(("weight ", "master "))}
            sides.append((tensors, losses_and_norms(run, 2)))
    (stock_tensors, stock_losses), (paged_tensors, paged_losses) = sides
    differences.of_tensors("weights and masters", stock_tensors, paged_tensors)
    differences.of_losses("losses", stock_losses, paged_losses, BF16_LOSS_TOLERANCE if "--bf16" in loaded else 1e-6)
    return differences.found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (f"{EXPERT_PARALLEL} --bf16 {NO_DROPOUT}", f"{EXPERT_PARALLEL} --bf16 {NO_DROPOUT}"),
        (f"{EXPERT_PARALLEL} {NO_DROPOUT}", NO_DROPOUT),
    ],
    ids=["masters-from-weights", "another-ep"],
)
def test_weights_alone_start_a_run_as_they_do_in_stock(pools, corpus, tmp_path, saved, loaded):
    assert pools[2].run(weights_alone, corpus=corpus, folder=str(tmp_path), saved=saved, loaded=loaded) == [{}] * 2
