"""Gradients completed, and pages stepped, in the last backward: the same bits, less io, and no second use unseen."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_model import ALL, Model, Task, Trained, batches_of, smallest_budget_of, train

OPEN = Task(clip=0.0)
TASKS = {
    "AdamW": OPEN,
    "bf16": replace(OPEN, dtype=torch.bfloat16),
    "L2, no lag": replace(OPEN, decoupled=False, max_lag=0),
    "recompute, three micro-batches": replace(OPEN, recompute=True, micro_batches=3),
    "no biases, one micro-batch": replace(OPEN, bias=False, micro_batches=1),
    "one page an expert": replace(OPEN, rows=48, ffn=48),
}


def smallest(task: Task, folder) -> PagingOptions:
    return PagingOptions(device_budget=Budget(nbytes=smallest_budget_of(task)), disk_path=folder)


@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["stepped", "completed"])
@pytest.mark.parametrize("name", TASKS)
def test_bits_are_those_of_a_sweep_after_the_backward(name, clip, tmp_path, seed):
    task = replace(TASKS[name], clip=clip, seed=seed % 1000)
    after = train(replace(task, in_backward=False))
    assert train(task, check=True).differs_from(after) == []
    assert train(task, smallest(task, tmp_path), check=True).differs_from(after) == []


@pytest.mark.parametrize(("clip", "least"), [(0.0, 0.2), (0.5, 0.05)], ids=["stepped", "completed"])
def test_less_goes_to_disk_and_comes_from_it(clip, least, tmp_path):
    task = replace(OPEN, clip=clip)
    swept, found = (train(replace(task, in_backward=on), smallest(task, tmp_path)).counts for on in (False, True))
    moved = [counts["bytes_loaded"] + counts["bytes_written"] for counts in (swept, found)]
    assert moved[1] < (1 - least) * moved[0]


@contextmanager
def model_of(task: Task = OPEN, options: PagingOptions = ALL):
    with batches_of(task):
        model = Model(task, options)
        try:
            yield model
        finally:
            model.manager.close()


@contextmanager
def half_a_step(task: Task = OPEN):
    """A model whose first step has made all its backwards."""
    with model_of(task) as model:
        generator = torch.Generator().manual_seed(1)
        model.manager.schedule.begin_step(1)
        for _ in range(task.micro_batches):
            model.forward(generator).backward()
        assert model.adam.is_open == (task.clip == 0.0)
        yield model, generator


def present(model: Model) -> int:
    return sum(int(model.manager.present(experts.pages, Plane.GRADIENT).sum()) for experts in model.modules)


def test_no_gradient_outlives_its_backward():
    with half_a_step(replace(OPEN, micro_batches=1)) as (model, _):
        assert model.gradients.stepped
        assert present(model) == 0
        model.gradients.finish(scale=1.0)
        assert present(model) == 0


def test_experts_without_tokens_in_the_last_backward_wait_for_the_step():
    with half_a_step() as (model, _):
        waiting = present(model)
        assert waiting > 0
        model.gradients.finish(scale=0.5)
        assert present(model) == waiting
        model.adam.step()
        assert not model.adam.is_open


def test_used_gradients_are_never_written_to_disk(tmp_path):
    task = replace(OPEN, clip=0.5)
    with model_of(task, smallest(task, tmp_path)) as model:
        written, disk = [], model.manager.pager.tiers.disk
        write = disk.write

        def noted(offset, slot, *, name):
            written.append(name())
            write(offset, slot, name=name)

        disk.write = noted
        for number in range(1, 4):
            model.step(number, Trained())
            assert present(model) == 0
            model.manager.pager.settle()
            written.clear()
            for experts in model.modules:  # makes room, as the next forward does
                for _ in model.manager.waves(experts.pages, range(experts.num_experts), planes=(Plane.WEIGHT,)):
                    pass
            model.manager.pager.settle()
            assert not [name for name in written if "gradient" in name]


def test_a_backward_more_than_announced_is_refused():
    with half_a_step(replace(OPEN, clip=0.5)) as (model, generator):
        losses = [model.forward(generator) for _ in range(3)]
        with pytest.raises(RuntimeError, match=r"announced with 2.*step-in-backward off"):
            torch.stack(losses).sum().backward()


def test_gradients_dropped_after_they_were_used_are_refused():
    with half_a_step() as (model, _), pytest.raises(RuntimeError, match=r"before the optimizer's step.*backward off"):
        model.gradients.drop()


def test_settings_changed_between_backward_and_step_are_refused():
    with half_a_step() as (model, _):
        model.groups[0]["lr"] = 0.5
        with pytest.raises(RuntimeError, match=r"settings changed.*lr=0\.5"):
            model.adam.step()


def test_clipping_or_scaling_what_was_applied_is_refused():
    with half_a_step() as (model, _):
        model.gradients.finish(scale=0.5)
        with pytest.raises(RuntimeError, match="scaled after"):
            model.gradients.scale(0.1)
        with pytest.raises(RuntimeError, match="clipped after"):
            model.adam.step(clip_coefficient=0.1)


def test_another_scale_than_the_backward_used_is_refused():
    with half_a_step() as (model, _), pytest.raises(RuntimeError, match="completed in the backward"):
        model.gradients.finish(scale=0.25)


def test_what_was_not_measured_in_time_is_not_made_up():
    with half_a_step() as (model, _):
        model.gradients.takes_sums = True
        with pytest.raises(RuntimeError, match="more is asked of gradients"):
            model.gradients.sums(model.modules[0], model.adam.shards)


def test_an_expert_with_a_gradient_that_is_not_finite_is_not_stepped():
    with model_of(replace(OPEN, micro_batches=1)) as model:
        before = Trained()
        model.export(before)
        model.manager.schedule.begin_step(1)
        (model.forward(torch.Generator().manual_seed(1)) * float("nan")).backward()
        assert model.gradients.non_finite is not None
        assert not model.gradients.stepped
        assert not model.adam.is_open
        after = Trained()
        model.export(after)
        names = [name for name in before.tensors if name.endswith(".weight")]
        assert all(before.tensors[name].equal(after.tensors[name]) for name in names)


def test_where_the_number_of_backwards_is_unknown_pages_wait():
    task = replace(OPEN, micro_batches=1)
    with model_of(task) as model:
        model.gradients.last._backwards = lambda: None
        model.manager.schedule.begin_step(1)
        for _ in range(3):
            model.forward(torch.Generator().manual_seed(1)).backward()
        assert present(model)
        assert not model.gradients.done


def test_a_run_that_is_resumed_steps_in_the_backward_at_once():
    with model_of() as model:
        model.adam.set_num_steps(7)
        model.manager.schedule.begin_step(8)
        generator = torch.Generator().manual_seed(1)
        for _ in range(OPEN.micro_batches):
            model.forward(generator).backward()
        assert model.gradients.stepped
        model.gradients.finish(scale=0.5)
        model.adam.step()
        assert model.adam.num_steps == 8


def test_weights_read_between_backward_and_step_are_refused():
    with half_a_step() as (model, generator):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"read between backward and optimizer step.*backward off"),
        ):
            model.forward(generator)
        with pytest.raises(RuntimeError, match="read between backward and optimizer step"):
            model.modules[-1].state_dict()
        model.adam.step()
        assert torch.isfinite(model.forward(generator))


def use(model: Model) -> list[float]:
    """A norm, a step, the norm of the gradients that it clipped, and another step by them."""
    model.manager.schedule.begin_step(1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(model.task.micro_batches):
        model.forward(generator).backward()
    model.gradients.finish(scale=1.0 / model.task.micro_batches)
    norms = []
    for _ in range(2):
        norms.append(model.gradients.squares(model.adam.shards) ** 0.5)
        model.adam.step(clip_coefficient=0.5 / norms[0])
    return norms


def test_gradients_used_twice_are_measured_again_or_refused(tmp_path):
    task = replace(OPEN, clip=0.5)
    with model_of(task) as model:
        _, second = use(model)
        assert second == pytest.approx(0.5, rel=1e-5)
    with model_of(task, smallest(task, tmp_path)) as model, pytest.raises(RuntimeError, match=r"used .* and are gone"):
        use(model)
    with half_a_step() as (model, generator):
        model.gradients.finish(scale=0.5)
        model.adam.step()
        for again in (
            model.adam.step,
            lambda: model.gradients.zeros(model.adam.shards),
            model.forward(generator).backward,
        ):
            with pytest.raises(RuntimeError, match=r"used .* and are gone"):
                again()
        model.gradients.drop()
        model.forward(generator).backward()


def test_without_it_gradients_of_several_passes_add_up():
    with model_of(replace(OPEN, in_backward=False)) as model:
        model.manager.schedule.begin_step(1)
        for _ in range(2):
            model.forward(torch.Generator().manual_seed(1)).backward()
            model.gradients.finish(scale=1.0)
        model.adam.step()
