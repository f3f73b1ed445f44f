"""Tokens of each expert are counted without making the host wait for how many counts there are."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.experts import HfExperts
from deepspeed_ext.run import Ranks
from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.tokens import ComingCounts


class Router:
    """What counting needs of experts."""

    path, all_experts, eager = "layers.0.experts", 4, False
    run = SimpleNamespace(ranks=Ranks())
    context = SimpleNamespace(backend=SimpleNamespace(by_index=False))

    def _counts_of(self, index_Tk: torch.Tensor) -> torch.Tensor:
        return HfExperts._counts_of(self, index_Tk)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_are_those_of_bincount_and_of_none(dtype):
    index = torch.randint(4, (7, 2), dtype=dtype)
    assert Router()._counts_of(index).tolist() == [*torch.bincount(index.view(-1), minlength=4).tolist(), 0]
    assert Router()._counts_of(index[:0]).tolist() == [0] * 5


@pytest.mark.parametrize("strange", [4, -1])
def test_an_expert_that_is_not_there_is_refused_by_its_number(strange):
    index = torch.tensor([[0, 1], [strange, 3]])
    with pytest.raises(ValueError, match=rf"layers.0.experts: the router chose expert {strange} of 4"):
        HfExperts.forward(Router(), torch.zeros(2, 8), index, torch.ones(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
def test_experts_that_go_ahead_are_given_numbers_that_nobody_has_waited_for(ahead):
    experts = HfExperts.__new__(HfExperts)
    experts.__dict__ |= {"all_experts": 4, "eager": True, "run": Router.run}
    experts.__dict__["context"] = SimpleNamespace(backend=SimpleNamespace(by_index=True))
    index, plain = torch.tensor([[0, 1], [3, 0]]), ComingCounts.wait
    with (
        patch.object(HfExperts, "path", "layers.0.experts"),
        patch.object(HfExperts, "goes_ahead", ahead),
        patch.object(PagedExperts, "forward") as forward,
        patch.object(ComingCounts, "wait", autospec=True, side_effect=plain) as waited,
    ):
        experts.forward(torch.zeros(2, 8), index, torch.ones(2, 2))
        assert waited.call_count == (not ahead)
        _, counts, weights, tokens, _ = forward.call_args.args
        if ahead:
            assert counts.on_device.tolist() == [2, 1, 0, 1]
            counts = counts.wait()
        assert counts == [2, 1, 0, 1]
        assert len(weights) == len(tokens) == 4
        if ahead:
            experts.forward(torch.zeros(2, 8), index + 1, torch.ones(2, 2))
            with pytest.raises(ValueError, match=r"layers.0.experts: the router chose expert 4 of 4"):
                forward.call_args.args[1].wait()
