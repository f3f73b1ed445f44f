"""Whole runs beside stock's: what steps report, where weights and random numbers start, and stock left unharmed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types

import pytest

from tests.distributed.pool import Pool
from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    losses,
    losses_and_norms,
    paged_modules,
    trainer,
)
from tests.integration.megatron_ext.snapshots import differing, same_bits, tensors_of

LOGS = "--log-params-norm --log-num-zeros-in-grad --eval-interval 2 --eval-iters 1 --split 90,10"
OVERLAP = f"{DISTRIBUTED_OPTIMIZER} --overlap-grad-reduce --overlap-param-gather"

# --- what a step reports ------------------------------------------------------------------------------------------

LAYOUTS = {
    "per-token": (1, "--calculate-per-token-loss --recompute-granularity selective --recompute-modules moe"),
    "capacity": (1, f"{GATED} --moe-expert-capacity-factor 0.5 --moe-pad-expert-input-to-capacity --bf16"),
    "top-1 on inputs": (1, "--moe-router-topk 1 --moe-apply-probs-on-input --moe-router-pre-softmax"),
    "shared experts": (2, f"{GATED} {EXPERT_PARALLEL} --moe-shared-expert-intermediate-size 48 --bf16"),
    "overlap": (2, f"{EXPERT_PARALLEL} {OVERLAP} --no-decoupled-weight-decay"),
    "overlap-dp2-bf16": (2, f"{GATED} {OVERLAP} --bf16 --grad-reduce-in-bf16"),
    "pp2ep2": (4, f"{EXPERT_PARALLEL} --pipeline-model-parallel-size 2 --calculate-per-token-loss"),
}


def reports(rank: int, world: int, *, corpus: str, options: str) -> dict[str, list[list[float]]]:
    """By side and quantity, values of three steps and of a validation after them."""
    found = {}
    for name, megascale in (("stock", False), ("megascale", True)):
        with trainer(corpus, options, NO_DROPOUT, LOGS, megascale=megascale) as run:
            steps = [run.train_step() for _ in range(3)]
            found[name] = [
                [step.loss for step in steps] + [run.evaluate()],
                [step.grad_norm or 0.0 for step in steps],
                [step.params_norm or 0.0 for step in steps],
                [step.num_zeros or 0.0 for step in steps],
            ]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_zero_counts_are_stocks(pools, corpus, layout):
    world, options = LAYOUTS[layout]
    answers = pools[world].run(reports, corpus=corpus, options=options)
    bound = 1e-4 if "--bf16" in options else 1e-6
    for found in answers:
        for stock, paged in zip(found["stock"][:3], found["megascale"][:3], strict=True):
            assert all(value > 0 for value in stock)
            assert paged == pytest.approx(stock, rel=bound)
        # A product of a page can round to zero where stock's did not, and the other way round; seldom.
        assert found["megascale"][3] == pytest.approx(found["stock"][3], abs=3)
        assert found == answers[0], "ranks report the same"


def clipped(rank: int, world: int, *, corpus: str, options: str) -> list[list[tuple[float, float | None]]]:
    """Losses and norms of stock's steps and of ours, all of which clip."""
    found = []
    for megascale in (False, True):
        with trainer(corpus, options, NO_DROPOUT, "--bf16 --clip-grad 0.1", megascale=megascale) as run:
            found.append(losses_and_norms(run, 8))
            assert all(experts.layout.num_slices == 1 for experts in (paged_modules(run) if megascale else ()))
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, GATED), (2, f"{GATED} {EXPERT_PARALLEL}"), (2, f"{GATED} {EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}")],
    ids=["alone", "ep2", "ep2-distributed"],
)
def test_in_bf16_clipping_is_stocks_to_the_last_bit(pools, corpus, world, options):
    for stock, paged in pools[world].run(clipped, corpus=corpus, options=options):
        assert min(norm or 0.0 for _, norm in stock) > 0.1, "every step clips"
        assert paged == stock


# --- where a run starts --------------------------------------------------------------------------------------------


def starts(rank: int, world: int, *, corpus: str, options: str) -> tuple[list[str], list[str], int]:
    """What of initial state and of random numbers differs from stock's."""
    from scripts.exactness.sides import RandomState

    found = []
    for megascale in (False, True):
        with trainer(corpus, options, megascale=megascale) as run:
            found.append((tensors_of(run), RandomState.capture()))
    (stock, stock_random), (paged, paged_random) = found
    differences = []
    if stock_random.of_python != paged_random.of_python:
        differences.append("random")
    if str(stock_random.of_numpy) != str(paged_random.of_numpy):
        differences.append("numpy")
    if not same_bits(stock_random.of_torch, paged_random.of_torch):
        differences.append("torch")
    differences += differing(stock_random.of_tracker, paged_random.of_tracker)
    return differing(stock, paged), differences, len([name for name in stock if ".experts." in name])


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, GATED),
        (1, "--bf16 --use-cpu-initialization"),
        (2, EXPERT_PARALLEL),
        (2, f"{EXPERT_PARALLEL} --use-cpu-initialization"),
        (2, f"{GATED} --pipeline-model-parallel-size 2"),
        (4, f"{GATED} {EXPERT_PARALLEL}"),
    ],
    ids=["gated", "bf16-biases-cpu", "ep2", "ep2-cpu", "pp2", "ep2dp2"],
)
def test_initial_weights_and_random_numbers_are_stocks_bit_for_bit(pools, corpus, world, options):
    answers = pools[world].run(starts, corpus=corpus, options=options)
    for weights, random_numbers, compared in answers:
        assert weights == []
        assert random_numbers == []
        assert compared >= 4


# --- stock is left alone --------------------------------------------------------------------------------------------


def objects_of_stock() -> dict[tuple[str, str], object]:
    """Every attribute of every module and class of Megatron-Core that is loaded."""
    found: dict[tuple[str, str], object] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in vars(module).items():
            if not attribute.startswith("__"):
                found[name, attribute] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, f"{attribute}.{key}"): inner for key, inner in vars(value).items()})
    return found


def import_everything(rank: int, world: int) -> tuple[bool, list[tuple[str, str]], list[str]]:
    already = any(name.partition(".")[0] == "megatron_ext" for name in sys.modules)
    before = objects_of_stock()
    import megatron_ext

    names = [module.name for module in pkgutil.walk_packages(megatron_ext.__path__, "megatron_ext.")]
    for name in names:
        if name != "megatron_ext.__main__":
            importlib.import_module(name)
    after = objects_of_stock()
    return already, [key for key in before if after.get(key) is not before[key]], names


def test_importing_the_adapter_changes_nothing_in_stock():
    pool = Pool(1)  # its rank has imported Megatron-Core and nothing of ours
    try:
        ((already, changed, names),) = pool.run(import_everything)
    finally:
        pool.stop()
    assert not already
    assert changed == []
    assert {"megatron_ext.patches", "megatron_ext.optimizer", "megatron_ext.distributed"} <= set(names)


def live_together(rank: int, world: int, *, corpus: str) -> list[str]:
    """Stock alone; stock and MegaScale, alive together and taking turns; stock again."""
    from scripts.exactness.sides import Sides
    from tests.integration.megatron_ext.runs import flags

    found = []
    with trainer(corpus, GATED, NO_DROPOUT) as run:
        alone = losses(run, 3), tensors_of(run)
    with Sides(flags(corpus, GATED, NO_DROPOUT), [], names=["stock", "megascale"], world=world) as sides:
        stock, paged = sides.stock.trainer, sides.by_name["megascale"].trainer
        if hasattr(stock.model[0], "paged_experts"):
            found.append("stock has MegaScale's data-parallel wrapper")
        together = []
        for _ in range(3):
            together.append(stock.train_step().loss)
            paged.train_step()
        if together != alone[0] or differing(alone[1], tensors_of(stock)):
            found.append("a stock run changes when MegaScale trains beside it")
        if not paged_modules(paged):
            found.append("MegaScale has no paged experts")
    with trainer(corpus, GATED, NO_DROPOUT) as run:
        if losses(run, 3) != alone[0] or differing(alone[1], tensors_of(run)):
            found.append("a stock run changes after MegaScale ran in its process")
        kinds = {type(run.model[0]).__name__, type(run.optimizer).__name__}
        if kinds != {"DistributedDataParallel", "ChainedOptimizer"}:
            found.append(f"stock is {kinds}")
    return found


def test_a_stock_run_is_the_same_bits_alone_beside_megascale_and_after_it(pools, corpus):
    assert pools[1].run(live_together, corpus=corpus) == [[]]
