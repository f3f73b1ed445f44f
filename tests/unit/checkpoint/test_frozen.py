"""Experts that a run does not train keep the state they had, for the run that trains them again."""

import pytest
import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from megascale_omni.paging.planes import Plane
from tests.unit.checkpoint.runs import MODULES, Layout, Run, ThreadRanks, load_newest, touched

TRAINED, FROZEN = MODULES


def saved(run: Run, root, step: int, *, full: bool = True) -> Checkpointer:
    checkpoints = Checkpointer(root)
    checkpoints.save(run.state(), SaveRequest(tag=f"t{step}", step=step, full=full))
    return checkpoints


def of_module(run: Run, path: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in run.weights().items() if name.startswith(path)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert found
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 8], ids=["the same pages", "smaller pages"])
def test_state_outlives_a_run_that_freezes(tmp_path, dtype, rows):
    first = Run(0, Layout(), dtype=dtype, bias=True)
    for number in range(1, 6):
        first.step(number, touched(number))
    saved(first, tmp_path, 5)
    assert first.lags() - {0}, "some pages have steps to catch up"
    expected = of_module(first, FROZEN)

    second = Run(0, Layout(rows=rows), dtype=dtype, bias=True, seed=99, frozen=[FROZEN])
    load_newest(Checkpointer(tmp_path), second)
    checkpoints = Checkpointer(tmp_path)
    for number in (6, 7, 8):
        second.step(number, touched(number))
        checkpoints.save(second.state(), SaveRequest(tag=f"t{number}", step=number, full=number == 6))

    third = Run(0, Layout(), dtype=dtype, bias=True, seed=98)
    load_newest(Checkpointer(tmp_path), third)
    assert third.adam.num_steps == 8
    assert any("MOMENT1" in name and bool(tensor.any()) for name, tensor in expected.items())
    assert_equal(of_module(third, FROZEN), expected)
    assert_equal(of_module(third, TRAINED), of_module(second, TRAINED))
    third.step(9, touched(9))


def test_state_of_replicas_is_kept_once(tmp_path):
    """Two replicas divide the frozen pages between them, and three divide them again."""
    first = Run(0, Layout())
    for number in range(1, 6):
        first.step(number, touched(number))
    saved(first, tmp_path, 5)
    expected = of_module(first, FROZEN)

    def frozen(rank) -> int:
        run = Run(rank.rank, Layout(2), seed=99, frozen=[FROZEN])
        checkpoints = Checkpointer(tmp_path, ranks=rank)
        load_newest(checkpoints, run)
        run.step(6, touched(6))
        checkpoints.save(run.state(), SaveRequest(tag="t6", step=6))
        module = run.modules[FROZEN]
        return int(module.manager.present(module.pages, Plane.MOMENT1).sum())

    here = ThreadRanks(2).run(frozen)
    module = first.modules[FROZEN]
    assert sum(here) == int(module.manager.present(module.pages, Plane.MOMENT1).sum())
    assert min(here) > 0
    second = Run(0, Layout(), seed=98)
    load_newest(Checkpointer(tmp_path), second)
    assert_equal(of_module(second, FROZEN), expected)


def test_experts_that_were_never_trained_begin_with_nothing(tmp_path):
    first = Run(0, Layout(), frozen=[FROZEN])
    for number in range(1, 4):
        first.step(number, touched(number))
    saved(first, tmp_path, 3)
    second = Run(0, Layout(), seed=99)
    load_newest(Checkpointer(tmp_path), second)
    module = second.modules[FROZEN]
    assert not module.manager.present(module.pages, Plane.MOMENT1).any()
    second.step(4, touched(4))
    assert_equal(of_module(second, TRAINED), of_module(continued(first, 4), TRAINED))


def continued(run: Run, number: int) -> Run:
    run.step(number, touched(number))
    return run
