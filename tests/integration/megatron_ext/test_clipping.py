"""Clipping by module inside of Megatron-Core: every layout alike, stock's bits, steps left out, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.megatron_ext.runs import (
    DISTRIBUTED_OPTIMIZER,
    EXPERT_PARALLEL,
    GATED,
    NO_DROPOUT,
    losses_and_norms,
    trainer,
)
from tests.integration.megatron_ext.snapshots import differing, tensors_of

CMSA = "--megascale-clip cmsa --megascale-cmsa-alpha 0.35 --clip-grad 0.1 --lr 1e-4"
AUTO = "--megascale-clip cmsa --clip-grad 0.1"
PIPELINE = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "dp2": (2, ""),
    "ep2": (2, EXPERT_PARALLEL),
    "pp2": (2, PIPELINE),
    "dp2-distributed": (2, DISTRIBUTED_OPTIMIZER),
    "ep2dp2": (4, EXPERT_PARALLEL),
    "ep2dp2-distributed": (4, f"{EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}"),
    "pp2ep2-per-token": (4, f"{PIPELINE} {EXPERT_PARALLEL}"),
}

# --- the same statistics in every layout ------------------------------------------------------------------------------


def save_start(rank: int, world: int, *, corpus: str, folder: str) -> None:
    with trainer(corpus, NO_DROPOUT, GATED, f"--save {folder}", CMSA, megascale=True) as run:
        run.save()


def reports(rank: int, world: int, *, corpus: str, folder: str, options: str) -> list[dict[str, Any]]:
    """By step, the numbers of each module, from weights that all layouts share."""
    start = f"--load {folder} --no-load-optim --no-load-rng --finetune"
    with trainer(corpus, options, NO_DROPOUT, GATED, CMSA, start, megascale=True) as run:
        found = []
        for _ in range(2):
            step = run.train_step()
            found.append({"grad_norm": step.grad_norm, **run.optimizer.clipping.report.as_record()["mpus"]})
        return found


@pytest.fixture(scope="module")
def one_process(pools, corpus, tmp_path_factory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("start") / "checkpoint")
    pools[1].run(save_start, corpus=corpus, folder=folder)
    return folder, pools[1].run(reports, corpus=corpus, folder=folder, options="")[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_what_one_process_finds(pools, corpus, one_process, layout):
    world, options = LAYOUTS[layout]
    folder, expected = one_process
    answers = pools[world].run(reports, corpus=corpus, folder=folder, options=options)
    assert answers == [answers[0]] * world, "the same bits on every rank"
    for found, wanted in zip(answers[0], expected, strict=True):
        assert found.keys() == wanted.keys()
        assert list(found)[1:] == ["embedding", "dense_0", "experts_0", "dense_1", "experts_1"]
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)
        for module in list(found)[1:]:
            assert found[module] == pytest.approx(wanted[module], rel=1e-6), module
    assert {m["clip_ratio"] < 1 for m in list(expected[0].values())[1:]} == {True, False}


# --- stock's bits -----------------------------------------------------------------------------------------------------

ONE = "--megascale-clip cmsa --megascale-cmsa-alpha 0"


def beside_stock(rank: int, world: int, *, corpus: str, options: str, mpus: str) -> list[str]:
    """What differs after three steps from MegaScale with stock's clipping, where all parameters are one module."""
    base = "--clip-grad 0.2"
    with trainer(corpus, options, NO_DROPOUT, GATED, base, megascale=True) as run:
        expected = losses_and_norms(run, 3), tensors_of(run)
    with trainer(corpus, options, NO_DROPOUT, GATED, base, ONE, f"--megascale-config {mpus}", megascale=True) as run:
        found = losses_and_norms(run, 3)
        clipped = run.optimizer.clipping.report.modules
        wrong = differing(expected[1], tensors_of(run))
    if found != expected[0]:
        wrong.append(f"losses and norms {found} instead of {expected[0]}")
    if len(clipped) != 1 or not clipped[0].coefficient < 1:
        wrong.append(f"nothing was clipped as one module: {clipped}")
    return wrong


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, ""), (1, "--bf16"), (2, EXPERT_PARALLEL), (2, DISTRIBUTED_OPTIMIZER), (2, PIPELINE)],
    ids=["single", "bf16", "ep2", "dp2-distributed", "pp2"],
)
def test_one_module_and_alpha_0_is_stocks_clipping_bit_for_bit(pools, corpus, tmp_path, world, options):
    mpus = tmp_path / "one.json"
    mpus.write_text('{"clip": {"mpus": {"*": "all"}}}')
    assert pools[world].run(beside_stock, corpus=corpus, options=options, mpus=str(mpus)) == [[]] * world


# --- dense models, tensor parallelism ---------------------------------------------------------------------------------

DENSE = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 16 "


def dense(rank: int, world: int, *, corpus: str, tp: int) -> list[float]:
    """Norm, spread and elements of each module of a dense model without experts."""
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.trainer import Trainer

    words = f"{DENSE} --micro-batch-size 4 --global-batch-size 4 --lr 1e-3 --train-iters 4 --split 100 {NO_DROPOUT}"
    words += f" --tensor-model-parallel-size {tp} --data-path {corpus} --megascale {CMSA} --use-cpu-initialization"
    with Trainer(parse_args(words.split())) as run:
        run.train_step()
        modules = run.optimizer.clipping.report.modules
        return [value for module in modules for value in (module.norm, module.gvc, module.elements)]


def test_a_dense_model_can_be_clipped_by_module_and_tensor_parallel_replicas_count_once(pools, corpus):
    (expected,) = pools[1].run(dense, corpus=corpus, tp=1)
    for found in pools[2].run(dense, corpus=corpus, tp=2):
        assert found == pytest.approx(expected, rel=1e-6)


# --- a weight that two stages have ------------------------------------------------------------------------------------


def tied(rank: int, world: int, *, corpus: str, mpus: str) -> tuple[torch.Tensor, dict[str, float]]:
    """The weight of embedding and output layer after two steps, and what modules were multiplied by."""
    options = f"{PIPELINE} --megascale-config {mpus}"
    with trainer(corpus, options, NO_DROPOUT, GATED, CMSA, megascale=True) as run:
        for _ in range(2):
            run.train_step()
        (weight,) = (p for p in run.model[0].parameters() if getattr(p, "shared_embedding", False))
        modules = run.optimizer.clipping.report.modules
        return weight.detach().clone(), {module.name: module.coefficient for module in modules}


def test_stages_that_share_a_weight_clip_it_alike(pools, corpus, tmp_path):
    mpus = tmp_path / "mpus.json"
    mpus.write_text('{"clip": {"mpus": {"embedding.*": "embedding", "*": "others"}}}')
    (first, clipped), (last, _) = pools[2].run(tied, corpus=corpus, mpus=str(mpus))
    assert clipped["embedding"] != clipped["others"]
    assert min(clipped.values()) < 1
    assert torch.equal(first, last)


# --- gradients that are not finite ------------------------------------------------------------------------------------


def with_bad_gradients(
    rank: int, world: int, *, corpus: str, options: str, where: str
) -> tuple[list[bool], list[int], list[str | None], bool]:
    """Four steps, the second with a NaN on the last rank: skipped?, their counts, what was named, weights unchanged?"""
    with trainer(corpus, options, NO_DROPOUT, GATED, megascale=True) as run:
        skipped, counts, names, unchanged = [], [], [], False
        for step in range(4):
            run.forward_backward()
            before = tensors_of(run)
            if step == 1 and rank == world - 1:
                spoil(run, where)
            if step == 1:
                for chunk in run.model:  # as after the schedule: statistics of pages are taken when they are reduced
                    chunk.gradients._statistics.clear()
            result = run.optimizer_step()
            skipped.append(not result.successful)
            clipping = run.optimizer.clipping
            counts.append(clipping.skipped_steps)
            names.append(clipping.report.non_finite if clipping.report is not None else None)
            if step == 1:
                unchanged = differing(before, tensors_of(run)) == []
        return skipped, counts, names, unchanged


def spoil(run: Any, where: str) -> None:
    if where == "dense":
        parameter = next(p for chunk in run.model for p in chunk.parameters() if p.requires_grad)
        parameter.main_grad.view(-1)[0] = math.nan
        return
    gradients = run.model[-1].gradients
    experts = gradients.modules[-1]
    name = gradients.present(experts)[0]
    for _, page in gradients.pages(experts, names=[name], write=True):
        page[0] = math.inf
    gradients._non_finite = f"{experts.path}, local expert {name[0]}"


@pytest.mark.parametrize("mode", ["--megascale-clip cmsa", "--megascale-nonfinite skip"], ids=["cmsa", "skip"])
@pytest.mark.parametrize(
    ("world", "options", "where"),
    [(1, "", "dense"), (2, EXPERT_PARALLEL, "experts"), (2, PIPELINE, "dense"), (2, PIPELINE, "experts")],
    ids=["single-dense", "ep2-experts", "pp2-dense", "pp2-experts"],
)
def test_a_step_with_bad_gradients_is_left_out_on_all_ranks(pools, corpus, mode, world, options, where):
    answers = pools[world].run(with_bad_gradients, corpus=corpus, options=f"{options} {mode}", where=where)
    assert answers == [answers[0]] * world
    skipped, counts, names, unchanged = answers[0]
    assert skipped == [False, True, False, False]
    assert counts == [0, 1, 1, 1]
    assert unchanged
    if "cmsa" in mode:
        assert names[1] is not None
        assert f"rank {world - 1}: " in names[1]
        assert ("local expert" in names[1]) == (where == "experts")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def interrupted(rank: int, world: int, *, corpus: str, options: str, folder: str) -> list[str]:
    """Fourteen steps at once beside eight, a checkpoint, and six."""
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, megascale=True) as run:
        expected = [(*pair, run.optimizer.clipping.report.alpha) for pair in with_alpha(run, 14)]
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, f"--save {folder}", megascale=True) as run:
        found = with_alpha(run, 8)
        run.save()
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, f"--load {folder}", megascale=True) as run:
        found += with_alpha(run, 6)
    wanted = [pair[:-1] for pair in expected]
    return [] if found == wanted else [f"{found} instead of {wanted}"]


def with_alpha(run: Any, steps: int) -> list[tuple[float, float | None, float | None]]:
    found = []
    for _ in range(steps):
        step = run.train_step()
        found.append((step.loss, step.grad_norm, run.optimizer.clipping.report.alpha))
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, ""), (1, "--bf16"), (2, EXPERT_PARALLEL), (2, DISTRIBUTED_OPTIMIZER)],
    ids=["single", "bf16", "ep2", "dp2-distributed"],
)
def test_calibration_goes_on_after_a_checkpoint(pools, corpus, tmp_path, world, options):
    folder = str(tmp_path / "checkpoint")
    assert pools[world].run(interrupted, corpus=corpus, options=options, folder=folder) == [[]] * world


def calibrated_state(rank: int, world: int, *, corpus: str, options: str, steps: int) -> str:
    """The clipper's state after some steps, and a save where they are any."""
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, megascale=True) as run:
        with_alpha(run, steps)
        if steps:
            run.save()
        return repr(run.optimizer.clipping.state_dict())


@pytest.mark.parametrize(
    ("first", "second"),
    [((2, f"{EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}"), (1, DISTRIBUTED_OPTIMIZER)), ((2, PIPELINE), (1, ""))],
    ids=["ep2-distributed-to-one", "pp2-to-one"],
)
def test_calibration_goes_on_in_another_layout(pools, corpus, tmp_path, first, second):
    folder = str(tmp_path / "checkpoint")
    saved = pools[first[0]].run(calibrated_state, corpus=corpus, options=f"{first[1]} --save {folder}", steps=8)
    loaded = pools[second[0]].run(calibrated_state, corpus=corpus, options=f"{second[1]} --load {folder}", steps=0)
    assert "'step': 8" in saved[0]
    assert {*saved} == {*loaded}, "nothing is lost, and all ranks have the same"


def through_stock(rank: int, world: int, *, corpus: str, options: str, folder: str) -> list[str]:
    """A checkpoint of a run that is calibrating loads in stock; one of stock's starts a calibration."""
    first, second = f"{folder}/first", f"{folder}/second"
    wrong = []
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, f"--save {first}", megascale=True) as run:
        with_alpha(run, 4)
        run.save()
        saved = tensors_of(run)
    with trainer(corpus, options, NO_DROPOUT, GATED, f"--load {first} --save {second}") as run:
        wrong += differing(saved, tensors_of(run))
        run.train_step()
        run.save()
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, f"--load {second}", megascale=True) as run:
        run.train_step()
        if run.optimizer.clipping.clipper.calibration.step != 1:
            wrong.append("calibration does not begin anew after stock")
    return wrong


def after_skipping(rank: int, world: int, *, corpus: str, folder: str) -> tuple[int, int]:
    """Left-out steps and calibrated steps of a run by module that goes on from one that clipped as stock."""
    with trainer(corpus, NO_DROPOUT, GATED, f"--megascale-nonfinite skip --save {folder}", megascale=True) as run:
        run.optimizer.clipping.skipped_steps = 2
        run.train_step()
        run.save()
    with trainer(corpus, NO_DROPOUT, GATED, AUTO, f"--load {folder}", megascale=True) as run:
        run.train_step()
        return run.optimizer.clipping.skipped_steps, run.optimizer.clipping.clipper.calibration.step


def test_clipping_by_module_can_begin_after_a_run_that_left_steps_out(pools, corpus, tmp_path):
    assert pools[1].run(after_skipping, corpus=corpus, folder=str(tmp_path / "checkpoint")) == [(2, 1)]


@pytest.mark.parametrize(("world", "options"), [(1, ""), (2, EXPERT_PARALLEL)], ids=["single", "ep2"])
def test_the_flag_can_be_dropped_and_added_at_a_restart(pools, corpus, tmp_path, world, options):
    answers = pools[world].run(through_stock, corpus=corpus, options=options, folder=str(Path(tmp_path)))
    assert answers == [[]] * world


# --- mistakes ---------------------------------------------------------------------------------------------------------


def refused(rank: int, world: int, *, corpus: str, options: str) -> str:
    import megatron_ext

    try:
        with trainer(corpus, options, NO_DROPOUT, GATED, megascale=True):
            return "nothing was refused"
    except ValueError as error:
        return str(error)
    finally:
        megatron_ext.disable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--megascale-clip cmsa --clip-grad 0", "CMSA needs a clipping norm above 0, not 0"),
        ("--megascale-clip cmsa --megascale-config {file}", "no parameter matches 'audio.*' (audio)"),
        ("--megascale-cmsa-alpha 0.5", "--megascale-cmsa-alpha=0.5 has no effect with clip.mode=stock"),
        (
            "--megascale-clip cmsa --megascale-cmsa-alpha 2",
            "--megascale-cmsa-alpha='2' must be auto or a number from 0 to 1",
        ),
    ],
)
def test_mistakes_are_told_before_training_on_every_rank(pools, corpus, tmp_path, options, message):
    path = tmp_path / "clip.json"
    path.write_text('{"clip": {"mpus": {"audio.*": "audio"}}}')
    for answer in pools[2].run(refused, corpus=corpus, options=options.format(file=path)):
        assert message in answer


def learned(rank: int, world: int, *, corpus: str, options: str) -> tuple[torch.Tensor, list[float]]:
    """Losses that the clipper was told, beside those that steps report."""
    with trainer(corpus, options, NO_DROPOUT, GATED, AUTO, megascale=True) as run:
        told = [run.train_step().loss for _ in range(4)]
        window = run.optimizer.clipping.clipper.calibration.window
        return torch.tensor([seen.losses[0] for seen in window]), told


@pytest.mark.parametrize("options", ["", PIPELINE, f"{PIPELINE} --calculate-per-token-loss"])
def test_every_rank_learns_the_loss(pools, corpus, options):
    for found, told in pools[2].run(learned, corpus=corpus, options=options):
        assert found.tolist() == pytest.approx(told, rel=1e-5)


# --- what a run writes down -------------------------------------------------------------------------------------------


def write_down(rank: int, world: int, *, corpus: str, folder: str) -> None:
    from scripts.moe_trainer.arguments import parse_args
    from scripts.moe_trainer.loop import train
    from tests.integration.megatron_ext.runs import flags

    files = f"--metrics-jsonl {folder}/run.jsonl --tensorboard-dir {folder}/board --no-progress"
    train(parse_args(flags(corpus, GATED, NO_DROPOUT, AUTO, files, PIPELINE, megascale=True)))


def test_a_run_writes_down_what_the_command_and_tensorboard_show(pools, corpus, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megascale_omni import cli

    pools[2].run(write_down, corpus=corpus, folder=str(tmp_path))
    assert cli.main(["clip", str(tmp_path), "--png", str(tmp_path / "clip.png")]) == 0
    text = capsys.readouterr().out
    assert "steps 1 to 20, alpha " in text
    assert "experts_1" in text
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    tags = board.Tags()["scalars"]
    for name in ("norm", "gvc", "clip_ratio", "threshold"):
        assert f"step/clip/mpus/dense_0/{name}" in tags
    assert len(board.Scalars("step/clip/mpus/dense_0/norm")) == 20
    assert len(board.Scalars("step/clip/alpha")) == 17, "nothing is written while clipping is off"
