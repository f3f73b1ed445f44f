"""What was saved at one layout loads at another, to the bit, with steps that are still outstanding."""

from pathlib import Path

import pytest
import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from tests.unit.checkpoint.runs import MODULES, Layout, Run, ThreadRanks, load_newest, touched

STEPS = 7


def trained(rank: int, layout: Layout, steps: int = STEPS, **options) -> Run:
    run = Run(rank, layout, **options)
    for number in range(1, steps + 1):
        run.step(number, touched(number))
    return run


def save(root: Path, layout: Layout, **options) -> None:
    ranks = ThreadRanks(layout.world)

    def work(rank) -> set[int]:
        run = trained(rank.rank, layout, **options)
        lags = run.lags()
        Checkpointer(root, ranks=rank).save(run.state(), SaveRequest(tag="t", step=STEPS))
        assert run.lags() == lags, "a save applies no outstanding step"
        return lags

    assert max(set().union(*ranks.run(work))) >= 3, "some pages are behind"


def loaded(root: Path, layout: Layout, *, more_steps: int = 0, before: int = 0, **options) -> dict[str, torch.Tensor]:
    ranks = ThreadRanks(layout.world)

    def work(rank):
        run = trained(rank.rank, layout, before, seed=99, **options)
        checkpoints = Checkpointer(root, ranks=rank)
        load_newest(checkpoints, run)
        for number in range(STEPS + 1, STEPS + 1 + more_steps):
            run.step(number, touched(number))
        run.manager.check_integrity()
        parts = run.state().tensors
        return run.weights() | {f"{p.name} {p.box}": p.tensor for p in parts if layout.world == 1}

    found: dict[str, torch.Tensor] = {}
    for part in ranks.run(work):
        for name, tensor in part.items():
            assert name not in found or torch.equal(found[name], tensor), f"replicas differ: {name}"
            found[name] = tensor
    return found


def straight(steps: int, **options) -> dict[str, torch.Tensor]:
    run = trained(0, Layout(), steps, **options)
    return run.weights() | {f"{p.name} {p.box}": p.tensor for p in run.state().tensors}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() <= expected.keys()
    assert {n for n in expected if n.startswith("layers")} <= found.keys()
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "target",
    [Layout(), Layout(4, ep=4), Layout(3), Layout(2, pp=2), Layout(4, ep=2), Layout(2, ep=2)],
    ids=["ep1", "ep4", "dp3", "pp2", "ep2dp2", "ep2"],
)
def test_ep2_dp2_loads_anywhere(tmp_path, target, dtype):
    save(tmp_path, Layout(4, ep=2), dtype=dtype)
    assert_same(loaded(tmp_path, target, dtype=dtype), straight(STEPS, dtype=dtype))
    assert_same(loaded(tmp_path, target, more_steps=5, dtype=dtype), straight(STEPS + 5, dtype=dtype))


@pytest.mark.parametrize("rows", [40, 32])
@pytest.mark.parametrize("decoupled", [True, False])
def test_another_page_size_loads(tmp_path, rows, decoupled):
    options = {"bias": True, "decoupled": decoupled, "dtype": torch.bfloat16}
    save(tmp_path, Layout(2, ep=2), **options)
    target = Layout(rows=rows)
    assert_same(loaded(tmp_path, target, **options), straight(STEPS, **options))
    assert_same(loaded(tmp_path, target, more_steps=4, **options), straight(STEPS + 4, **options))


def test_a_run_that_steps_every_page_loads_what_is_behind(tmp_path):
    save(tmp_path, Layout(4, ep=2))
    assert_same(loaded(tmp_path, Layout(), max_lag=0, more_steps=3), straight(STEPS + 3))


def test_a_run_that_has_gone_on_is_what_the_checkpoint_says(tmp_path):
    save(tmp_path, Layout(2, ep=2))
    assert_same(loaded(tmp_path, Layout(), before=11, more_steps=4), straight(STEPS + 4))


def test_weights_alone_are_caught_up_and_masters_follow(tmp_path):
    save(tmp_path, Layout(2, ep=2), dtype=torch.bfloat16)
    run = trained(0, Layout(), 3, seed=99, dtype=torch.bfloat16)
    checkpoints = Checkpointer(tmp_path)
    load_newest(checkpoints, run, with_optimizer=False)
    found, expected = run.weights(), straight(STEPS, dtype=torch.bfloat16)
    for name in (n for n in found if " WEIGHT " in n):
        assert torch.equal(found[name], expected[name]), name
        assert torch.equal(found[name.replace("WEIGHT", "MASTER")], found[name].float()), name


def test_what_matches_nothing_is_an_error_on_every_rank(tmp_path):
    save(tmp_path, Layout(2, ep=2))
    run = Run(0, Layout())
    before = run.weights()
    state = run.state()
    checkpoints = Checkpointer(tmp_path)
    opened = checkpoints.open()
    assert opened is not None
    fewer = type(state)(state.tensors[:1], state.experts, state.adam)
    with pytest.raises(ValueError, match="has flat, which matches nothing in this run"):
        checkpoints.load(opened, fewer)
    half = type(state)(state.tensors, state.experts[:1], state.adam)
    with pytest.raises(ValueError, match=rf"has {MODULES[1]}, which matches nothing"):
        checkpoints.load(opened, half)
    assert_same(run.weights(), before)


def test_other_sizes_are_refused_before_anything_is_loaded(tmp_path):
    save(tmp_path, Layout(2, ep=2))
    run = Run(0, Layout(), bias=True)
    before = run.weights()
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(ValueError, match=r"has 4 experts of ExpertShape.* at layers.0.experts, the model needs 4 of"):
        load_newest(checkpoints, run)
    assert_same(run.weights(), before)
