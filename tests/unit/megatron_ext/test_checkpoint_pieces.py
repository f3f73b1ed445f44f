"""Optimizer state of parameters that tensor parallelism cuts: each element, and each step, is in a checkpoint once."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from megascale_omni.checkpoint.boxes import Box, whole
from megascale_omni.checkpoint.dense import DenseIndex, TensorPiece, TensorsPlan
from megascale_omni.checkpoint.snapshot import in_order
from megatron_ext.checkpoint_frozen import frozen_state, parts_here
from megatron_ext.checkpoint_state import KeyPlace, model_pieces, optimizer_pieces

SHAPE = {"alone": (4, 3), "of a stack of layers": (5, 4, 3)}
RANKS = (0, 1)


def of_rank(rank: int, case: str) -> tuple[list[TensorPiece], list[TensorPiece]]:
    """Pieces of half of a matrix, of layer 2 where it is one of a stack: of the model, and of the optimizer."""
    parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stacked = case != "alone"
    box = Box((2, 2 * rank, 0), (1, 2, 3)) if stacked else Box((2 * rank, 0), (2, 3))
    place = KeyPlace("weight", SHAPE[case], box, whole((2, 3)), main=True, main_but_for_data=True)
    places = [(parameter, [place])]
    member = SimpleNamespace(is_stub_optimizer=False, optimizer=optimizer)
    chain = SimpleNamespace(dense=SimpleNamespace(chained_optimizers=[member]))
    return model_pieces(places), optimizer_pieces(chain, places)  # type: ignore[arg-type]


def saved(folder, of_ranks: list[list[TensorPiece]]) -> DenseIndex:
    plans = [TensorsPlan(pieces, path=f"{rank}", register=in_order) for rank, pieces in enumerate(of_ranks)]
    return DenseIndex(folder, [plan.index() for plan in plans])


@pytest.mark.parametrize("case", SHAPE)
def test_the_step_of_a_parameter_that_is_cut_is_stored_once(tmp_path, case):
    of_ranks = [of_rank(rank, case)[1] for rank in RANKS]
    index = saved(tmp_path, of_ranks)
    for pieces in of_ranks:
        assert {piece.name for piece in pieces} == {f"optimizer.{k}.weight" for k in ("step", "exp_avg", "exp_avg_sq")}
        assert index.problems(pieces) == []


@pytest.mark.parametrize("case", SHAPE)
def test_a_run_that_freezes_it_keeps_its_step_once(tmp_path, case):
    found = [of_rank(rank, case) for rank in RANKS]
    index = saved(tmp_path, [optimizer for _, optimizer in found])
    carried = frozen_state(index, [parts_here(model) for model, _ in found])
    assert [part.name for part in carried].count("optimizer.step.weight") == 1
    pieces = [
        TensorPiece(part.name, part.global_shape, part.box, torch.zeros(part.box.shape), writes=True)
        for part in carried
    ]
    again = saved(tmp_path, [pieces])
    assert all(again.problems(optimizer) == [] for _, optimizer in found)
