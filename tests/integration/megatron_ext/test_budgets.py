"""Residency never changes bits: whole runs under the smallest budget that works against the same runs all resident."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    largest_relative_difference,
    losses_and_norms,
    paged_modules,
    trainer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripts.moe_trainer.trainer import Trainer

# Experts of several pages, so that a budget of few pages is far below the state.
SIZES = "--hidden-size 64 --ffn-hidden-size 256"
MODEL = f"{SIZES} --megascale-page-size 64KiB"
INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
SMALL_BATCHES = 128 * 1024


def smallest_percentage(run: Trainer) -> float:
    """The smallest budget that works, in per cent of all pages."""
    from megascale_omni.paging.budget import smallest_budget
    from megascale_omni.paging.needs import class_needs

    needs = class_needs(paged_modules(run)[0].manager.modules)
    total = sum(need.pages * c.nbytes for c, need in needs.items())
    return 100 * smallest_budget(needs) / total + 0.01


def train(run: Trainer) -> list[Any]:
    """Losses, norms and validation losses of three steps with an evaluation between them."""
    return [*losses_and_norms(run, 2), run.evaluate(), *losses_and_norms(run, 1), run.evaluate()]


def at_budgets(rank: int, world: int, *, corpus: str, folder: str, options: str) -> dict[str, object]:
    """Runs all resident, then under budgets; returns what is not equal, and what was never evicted."""
    from megascale_omni.paging import batches
    from scripts.measurements.slow_io import delayed_io
    from scripts.moe_trainer import checkpointing

    options = f"{MODEL} {options} --split 90,10 --eval-iters 2 --eval-interval 100"
    wrong: dict[str, object] = {}
    with mock.patch.object(batches, "BATCH_BYTES", SMALL_BATCHES):
        with trainer(corpus, options, megascale=True) as run:
            expected = train(run)
            percent = smallest_percentage(run)
            checkpointing.save(run, f"{folder}/resident")
            later = losses_and_norms(run, 2)
        paging = f"--megascale-disk-path {folder}"
        for name, more in {
            "smallest": f"{paging} --megascale-device-budget {percent:.2f}%",
            "others": f"{paging} --megascale-device-budget {percent:.2f}% --megascale-host-budget 40% "
            "--megascale-prefetch none --megascale-max-lag 0 --megascale-optimizer-device host",
        }.items():
            with delayed_io(f"{name} {rank}", longest=1e-3), trainer(corpus, options, more, megascale=True) as run:
                found = train(run)
                manager = paged_modules(run)[0].manager
                manager.check_integrity()
                if found != expected:
                    wrong[name] = (expected, found)
                if not manager.stats()["pages_evicted"]:
                    wrong[f"{name}: evicted"] = manager.stats()
                adam = paged_modules(run)[0].adam
                assert adam is not None
                if bool(adam.deciding) != (name == "others"):
                    wrong[f"{name}: stepped in host memory"] = manager.stats()
        with trainer(corpus, options, more, f"--load {folder}/resident", megascale=True) as run:
            resumed = losses_and_norms(run, 2)
            if resumed != later:
                wrong["resumed"] = (later, resumed)
            checkpointing.save(run, f"{folder}/paged")
    return wrong


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, GATED, id="single"),
        pytest.param(1, "--bf16 --calculate-per-token-loss", id="bf16-biases-per-token"),
        pytest.param(2, f"{EXPERT_PARALLEL} --disable-bias-linear", id="ep2"),
        pytest.param(2, f"{GATED} {INTERLEAVED}", id="interleaved-pp2"),
        pytest.param(4, f"{GATED} {EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}", id="ep2dp2-distributed"),
    ],
)
def test_a_run_has_the_same_bits_at_any_budget(pools, corpus, tmp_path, world, options):
    answers = pools[world].run(at_budgets, corpus=corpus, folder=str(tmp_path), options=options)
    assert answers == [{}] * world


def in_the_backward(rank: int, world: int, *, corpus: str, folder: str, options: str) -> dict[str, object]:
    """Runs with and without gradients completed and pages stepped in the backward; what differs or did not happen."""
    from megascale_omni.paging import batches

    wrong: dict[str, object] = {}
    found: dict[str, list[Any]] = {}
    with mock.patch.object(batches, "BATCH_BYTES", SMALL_BATCHES):
        with trainer(corpus, MODEL, options, "--megascale-step-in-backward off", megascale=True) as run:
            found["resident, off"] = losses_and_norms(run, 3)
            percent = smallest_percentage(run)
        with trainer(corpus, SIZES, options) as run:
            stock = losses_and_norms(run, 3)
        paging = f"--megascale-disk-path {folder} --megascale-device-budget {percent:.2f}%"
        for name, more in {"resident": "", "smallest": paging}.items():
            with trainer(corpus, MODEL, options, more, megascale=True) as run:
                stepped: list[int] = []
                for chunk in run.model:
                    chunk.finish_grad_sync = noted(chunk, stepped)
                found[name] = losses_and_norms(run, 3)
                applied = run.args.clip_grad == 0 and not run.args.calculate_per_token_loss
                if len(stepped) != 3 * len(run.model) or (sum(stepped) > 0) != applied:
                    wrong[f"{name}: stepped"] = stepped
    if any(result != found["resident, off"] for result in found.values()):
        wrong["bits"] = found
    if largest_relative_difference(*([float(x or 0) for x in chain(*r)] for r in (stock, found["resident"]))) > 1e-5:
        wrong["stock"] = (stock, found["resident"])
    return wrong


def noted(chunk: Any, stepped: list[int]) -> Callable[..., None]:
    """The chunk's ``finish_grad_sync``; notes how many pages have been stepped when it is called."""
    finish = chunk.finish_grad_sync

    def call(*inputs: Any, **options: Any) -> None:
        stepped.append(len(chunk.gradients.stepped))
        assert chunk.gradients.done or not any(present_gradients(e) for e in chunk.paged_experts)
        finish(*inputs, **options)

    return call


def present_gradients(experts: Any) -> int:
    from megascale_omni.paging.planes import Plane

    return int(experts.manager.present(experts.pages, Plane.GRADIENT).sum())


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, f"{GATED} --clip-grad 0", id="single"),
        pytest.param(1, f"{GATED} --clip-grad 0 --calculate-per-token-loss", id="per-token"),
        pytest.param(2, f"{EXPERT_PARALLEL} {GATED} --clip-grad 0 --recompute-granularity selective", id="ep2"),
        pytest.param(2, f"{GATED} {INTERLEAVED} --clip-grad 0", id="interleaved-pp2"),
        pytest.param(2, f"{GATED} {INTERLEAVED}", id="interleaved-pp2-clip"),
    ],
)
def test_a_step_in_the_backward_has_the_bits_of_one_after_it(pools, corpus, tmp_path, world, options):
    answers = pools[world].run(in_the_backward, corpus=corpus, folder=str(tmp_path), options=options)
    assert answers == [{}] * world
