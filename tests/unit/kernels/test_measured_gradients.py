"""Gradients that kernels measure: the numbers that torch's operators give, read all at once and by nobody before."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.shards import PageShards
from megascale_omni.paging.planes import Plane
from tests.unit.kernels.test_backend import kernel_experts

ALL = PageShards()


class Reads(TorchDispatchMode):
    """Counts the numbers that the host asks for one by one."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


def measured(monkeypatch: pytest.MonkeyPatch, by_kernel: bool, asked: dict[str, bool], scale: float, bad: bool) -> Any:
    """What is said of the gradients of one step."""
    torch.manual_seed(5)
    experts = kernel_experts(rows=16, bias=True)
    names = [(0, 1), (2, 0), (2, 1)]
    experts.manager.create_ids(experts.pages, Plane.GRADIENT, experts.page_ids(Plane.GRADIENT, names))
    with experts.lease(Plane.GRADIENT, names) as lease:
        lease.mark_dirty()
        for name in names:
            lease.page(*name).normal_()
        lease.page(0, 1)[3:8] = 0.0
    if bad:
        with experts.lease(Plane.GRADIENT, [(2, 1)]) as lease:
            lease.page(2, 1)[7:9] = torch.tensor([float("nan"), float("inf")])
    monkeypatch.setattr(experts.context.backend, "measures", lambda page: by_kernel)
    gradients = ExpertGradients([experts])
    for name, value in asked.items():
        setattr(gradients, name, value)
    with torch.no_grad(), Reads() as reads:
        gradients.finish(scale=scale)
        assert bool(reads.found) != by_kernel, "numbers are read when they are wanted"
        non_finite = gradients.non_finite
        found = [gradients.squares(ALL), gradients.zeros(ALL), vars(gradients.sums(experts, ALL)), non_finite]
        assert bool(reads.found) != by_kernel
    gradients.drop()
    assert gradients.non_finite is None
    return found


NORMS: dict[str, bool] = {}
SUMS, NOTHING = {"takes_sums": True}, {"takes_norms": False, "counts_zeros": False}


@pytest.mark.parametrize(
    ("asked", "scale", "bad"),
    [(NORMS, 1.0, False), (NORMS, 0.125, True), (SUMS, 0.125, False), (SUMS, 1.0, True), (NOTHING, 0.125, True)],
)
def test_kernels_and_torch_say_the_same(monkeypatch, asked, scale, bad):
    by_torch, by_kernel = (measured(monkeypatch, kernel, asked, scale, bad) for kernel in (False, True))
    assert (by_torch[3] is not None) == bad
    assert by_kernel[3] == by_torch[3]
    assert by_kernel[1] == by_torch[1]
    if bad:
        assert by_kernel[2]["non_finite"] == by_torch[2]["non_finite"] == 2
        return
    assert by_kernel[0] == by_torch[0], "norms are taken by the same operator"
    assert by_kernel[2] == pytest.approx(by_torch[2], rel=1e-5)
