"""Frozen experts and early routers in whole runs: ranks decide alike, and nothing but rerouting changes a result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from tests.integration.megatron_ext.runs import (
    EXPERT_PARALLEL,
    GATED,
    largest_relative_difference,
    losses,
    paged_modules,
    trainer,
)

if TYPE_CHECKING:
    from megascale_omni.heat.keeper import HeatKeeper
    from scripts.moe_trainer.trainer import Trainer

QUICK = {"refresh_steps": 1, "window_steps": 4, "cold_steps": 2, "cold_percentile": 50, "probe_share": 0}
UNLOVED = 3
"""An expert that the routers do not choose until they are told to."""
STOCK_MODEL = "--hidden-size 64 --ffn-hidden-size 256"
MODEL = f"{STOCK_MODEL} --megascale-page-size 64KiB"
ONE_CHOICE = "--moe-router-topk 1 --moe-router-pre-softmax"
INTERLEAVED = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


def configuration(folder: str, rank: int) -> str:
    """The flags for a heat map that decides soon."""
    path = Path(folder) / f"heat{rank}.json"
    path.write_text(json.dumps({"heat": QUICK}))
    return f"--megascale-config {path}"


@contextmanager
def preferences() -> Iterator[dict[int | tuple[int, int], float]]:
    """While it lasts, stock's routers add these numbers to the logits of experts, or of (layer, expert)."""
    from megatron.core.transformer.moe.router import TopKRouter

    extra: dict[int | tuple[int, int], float] = {}
    gating = TopKRouter.gating

    def preferring(self: Any, inputs: Any) -> Any:
        logits = gating(self, inputs)
        added = logits.new_zeros(logits.shape[-1])
        for name, number in extra.items():
            layer, expert = name if isinstance(name, tuple) else (self.layer_number - 1, name)
            if layer == self.layer_number - 1:
                added[expert] += number
        return logits + added

    with mock.patch.object(TopKRouter, "gating", preferring):
        yield extra


def keeper_of(run: Trainer) -> HeatKeeper:
    from megatron_ext import patches

    keeper = patches.active_runtime().observation.keeper
    assert keeper is not None
    assert run.model
    return keeper


def decisions(keeper: HeatKeeper) -> list[list[int]]:
    """The states of all experts of all layers, where ranks agreed on them."""
    assert keeper._agreed is not None
    return [states.tolist() for states in keeper._agreed.states]


def tokens_of(run: Trainer) -> list[list[int]]:
    """The last step in which each local expert of this rank had a token."""
    return [keeper_of(run).map.last_token_step[m.pages.entry.module].tolist() for m in paged_modules(run)]


def freeze_and_ask(rank: int, world: int, *, corpus: str, folder: str, options: str) -> dict[str, Any]:
    """Eight steps without the unloved expert, then three in which routers prefer it; what was decided after each."""
    found: dict[str, Any] = {"states": [], "losses": []}
    with preferences() as extra, trainer(corpus, MODEL, configuration(folder, rank), options, megascale=True) as run:
        extra[UNLOVED] = -50.0
        for step in range(11):
            if step == 8:
                extra[UNLOVED] = 50.0
            found["losses"] += losses(run, 1)
            found["states"].append(decisions(keeper_of(run)))
        found["tokens"] = tokens_of(run)
        found["counts"] = dict(keeper_of(run).counts)
        found["first"] = keeper_of(run)._agreed.exchange.first  # type: ignore[union-attr]
        paged_modules(run)[0].manager.check_integrity()
    return found


BUDGET = "--megascale-device-budget 60% --megascale-disk-path"


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, f"{GATED} {EXPERT_PARALLEL} {ONE_CHOICE}", id="ep2"),
        pytest.param(4, f"{GATED} {EXPERT_PARALLEL} {ONE_CHOICE}", id="ep2dp2"),
        pytest.param(2, f"{GATED} {ONE_CHOICE}", id="dp2"),
    ],
)
def test_all_ranks_freeze_and_wake_the_same_experts_at_the_same_step(pools, corpus, tmp_path, world, options):
    options = f"{options} {BUDGET} {tmp_path}"
    answers = pools[world].run(freeze_and_ask, corpus=corpus, folder=str(tmp_path), options=options)
    for answer in answers[1:]:
        assert answer["states"] == answers[0]["states"]
    states = answers[0]["states"]
    assert all(layer[UNLOVED] == 0 for layer in states[7]), "frozen in all layers"
    assert all(layer[UNLOVED] > 0 for layer in states[-1]), "a token woke it"
    for answer in answers:
        experts = len(answer["tokens"][0])
        if answer["first"] <= UNLOVED < answer["first"] + experts:
            assert answer["counts"]["frozen"] >= 2
            assert answer["counts"]["woken"] >= 2


def goes_on(rank: int, world: int, *, corpus: str, folder: str, options: str, frozen_first: bool) -> dict[str, Any]:
    """Three steps in which the routers want the unloved expert, after eight without it, or after what was loaded."""
    with preferences() as extra, trainer(corpus, MODEL, configuration(folder, rank), options, megascale=True) as run:
        if frozen_first:
            extra[UNLOVED] = -50.0
            losses(run, 8)
            run.save()
            run.finish_saves()
        extra[UNLOVED] = 50.0
        found: dict[str, Any] = {"states": [decisions(keeper_of(run))], "losses": []}
        for _ in range(3):
            found["losses"] += losses(run, 1)
            found["states"].append(decisions(keeper_of(run)))
        return found


def test_heat_goes_on_from_a_checkpoint(pools, corpus, tmp_path):
    """What is frozen stays frozen until a token wakes it, at the same step as in the run that was not interrupted."""
    options = f"{GATED} {ONE_CHOICE} {BUDGET} {tmp_path} --megascale-checkpoint-format paged"
    save, load = f"--save {tmp_path}/run", f"--load {tmp_path}/run"
    ask = {"corpus": corpus, "folder": str(tmp_path)}
    straight = pools[2].run(goes_on, options=f"{options} {EXPERT_PARALLEL} {save}", frozen_first=True, **ask)
    assert all(layer[UNLOVED] == 0 for layer in straight[0]["states"][0]), "frozen when it was saved"
    assert all(layer[UNLOVED] > 0 for layer in straight[0]["states"][-1]), "woken since"
    again = pools[2].run(goes_on, options=f"{options} {EXPERT_PARALLEL} {load}", frozen_first=False, **ask)
    assert again == straight
    replicas = pools[2].run(goes_on, options=f"{options} {load}", frozen_first=False, **ask)
    assert replicas[0]["states"][0] == straight[0]["states"][0], "loaded in another layout"
    assert unloved(replicas[0]["states"]) == unloved(straight[0]["states"])


def unloved(states: list[list[list[int]]]) -> list[list[bool]]:
    """Whether the unloved expert was frozen, after each step and in each layer."""
    return [[layer[UNLOVED] == 0 for layer in layers] for layers in states]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, f"{GATED} {ONE_CHOICE}", id="single"),
        pytest.param(2, f"{GATED} {EXPERT_PARALLEL}", id="ep2"),
        pytest.param(4, f"{GATED} {EXPERT_PARALLEL} {ONE_CHOICE}", id="ep2dp2"),
    ],
)
def test_a_frozen_expert_gets_no_token_where_routers_leave_it_out(pools, corpus, tmp_path, world, options):
    reroute = f"{options} --megascale-frozen reroute"
    answers = pools[world].run(freeze_and_ask, corpus=corpus, folder=str(tmp_path), options=reroute)
    states = answers[0]["states"]
    assert all(layer[UNLOVED] == 0 for step in states[7:] for layer in step), "once and for all"
    for answer in answers:
        assert answer["states"] == states
        place = UNLOVED - answer["first"]
        for last in answer["tokens"]:
            if 0 <= place < len(last):
                assert last[place] <= 1, "all that it had was before the first step"
    chosen = 1 if "pre-softmax" in options else 2
    assert all(sum(state > 0 for state in layer) >= chosen for step in states for layer in step)


def by_stock(corpus: str, options: str, states: list[list[list[int]]]) -> list[float]:
    """Losses of stock in the same steps, where the logits of frozen experts are minus infinity by hand."""
    with preferences() as extra, trainer(corpus, STOCK_MODEL, options, megascale=False) as run:
        found = []
        for number, layers in enumerate(states):
            extra.clear()
            extra[UNLOVED] = -50.0 if number < 8 else 50.0
            for layer, of_experts in enumerate(layers):
                extra.update({(layer, e): float("-inf") for e, state in enumerate(of_experts) if state == 0})
            found += losses(run, 1)
    return found


def rerouted(rank: int, world: int, *, corpus: str, folder: str, options: str) -> dict[str, list[float]]:
    """Losses with frozen experts waking, left out, left out under a budget, and left out of stock by hand."""
    found = {}
    for name, more in {
        "wake": "",
        "under a budget": f"--megascale-frozen reroute {BUDGET} {folder}",
        "reroute": "--megascale-frozen reroute",
    }.items():
        answer = freeze_and_ask(rank, world, corpus=corpus, folder=folder, options=f"{options} {more}")
        found[name] = answer["losses"]
    found["stock"] = by_stock(corpus, options, answer["states"])
    return found


def test_rerouting_changes_losses_as_minus_infinity_does_in_stock_and_a_budget_does_not(pools, corpus, tmp_path):
    options = f"{GATED} {EXPERT_PARALLEL} {ONE_CHOICE}"
    for found in pools[2].run(rerouted, corpus=corpus, folder=str(tmp_path), options=options):
        assert found["reroute"] == found["under a budget"]
        assert found["reroute"][:8] == found["wake"][:8], "nobody misses an expert that is not chosen"
        assert found["reroute"] != found["wake"]
        assert largest_relative_difference(found["reroute"], found["stock"]) < 1e-5
        assert largest_relative_difference(found["wake"], found["stock"]) > 1e-4


# -- early routers -----------------------------------------------------------------------------------------------------


def foreseen(rank: int, world: int, *, corpus: str, folder: str, options: str) -> dict[str, Any]:
    """Losses with and without asking routers early, and how often they were right."""
    from megatron_ext import patches

    layers = "" if "--num-layers " in options else "--num-layers 3"
    options = f"{MODEL} {layers} {options} {BUDGET} {folder} --eval-iters 2 --eval-interval 100 --split 90,10"
    found: dict[str, Any] = {}
    for prefetch in ("none", "history", "early-router"):
        with trainer(corpus, options, f"--megascale-prefetch {prefetch}", megascale=True) as run:
            found[prefetch] = [*losses(run, 3), run.evaluate(), *losses(run, 1)]
            manager = paged_modules(run)[0].manager
            manager.check_integrity()
            early = patches.active_runtime().early_router
            found[f"{prefetch}: came"] = manager.stats()["page_faults"], manager.stats()["pages_loaded"]
            found[f"{prefetch}: records"] = early and {n: r.counts for n, r in early._foresight.records.items()}
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, f"{GATED} {ONE_CHOICE} --micro-batch-size 1", id="single"),
        pytest.param(2, f"{EXPERT_PARALLEL} --disable-bias-linear", id="ep2"),
        pytest.param(2, f"{GATED} {INTERLEAVED}", id="interleaved-pp2"),
        pytest.param(
            1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", id="recompute"
        ),
    ],
)
def test_asking_routers_early_changes_no_bit(pools, corpus, tmp_path, world, options):
    for found in pools[world].run(foreseen, corpus=corpus, folder=str(tmp_path), options=options):
        assert found["early-router"] == found["history"] == found["none"]
        assert found["none: records"] is None
        assert found["history: records"] is None
        records = found["early-router: records"]
        there = [1] if INTERLEAVED in options else [1, 2]  # of two layers a rank
        assert sorted(records) == there, "nobody can be asked for the first layer"
        faults, came = found["none: came"]
        assert faults == came, "nothing is fetched ahead"
        assert all(found[f"{ahead}: came"][0] < faults for ahead in ("history", "early-router"))
        for counts in records.values():
            assert 0 < counts["right"] <= counts["named"]


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused(rank: int, world: int, *, corpus: str, options: str) -> str:
    try:
        with trainer(corpus, options, megascale=True):
            return "it started"
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--moe-router-load-balancing-type sinkhorn", "does not go with --moe-router-load-balancing-type sinkhorn"),
        (
            "--megascale-dispatcher groups",
            "does not go with --megascale-move auto: an expert's owner does not see the tokens",
        ),
        (
            "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
            "does not go with --moe-router-enable-expert-bias: its bias could choose a frozen expert",
        ),
    ],
)
def test_routers_that_a_mask_does_not_decide_are_refused(pools, corpus, options, message):
    (found,) = pools[1].run(refused, corpus=corpus, options=f"{options} --megascale-frozen reroute")
    assert message in found


def test_counts_of_replicas_are_added_and_of_owners_put_side_by_side(pools):
    assert pools[4].run(exchanged) == [True] * 4


def exchanged(rank: int, world: int) -> bool:
    """Ranks 0, 1 own experts 0-1 and 2-3, ranks 2, 3 are their replicas; each counts ``rank + 1`` everywhere."""
    import torch
    import torch.distributed as dist

    from megascale_omni.heat.agreement import GroupExchange

    owners = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    exchange = GroupExchange(2, owners=owners, replicas=pairs[rank % 2], device=torch.device("cpu"))
    total = exchange.total(np.full((3, 2, 3), rank + 1, dtype=np.int64))
    sums, newest = np.array([1 + 3, 1 + 3, 2 + 4, 2 + 4]), np.array([3, 3, 4, 4])
    expected = np.stack([sums, sums, newest], axis=1)
    return exchange.first == 2 * (rank % 2) and bool((total == expected).all()) and total.shape == (3, 4, 3)
