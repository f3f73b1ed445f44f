"""Sums of gradients against fp64 on the whole tensor, however it is cut and whatever is in it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_omni.clipping.statistics import RUN, GradientSums, from_rows, statistics_of


def reference(tensor: torch.Tensor) -> dict[str, float]:
    """The definitions, written down."""
    g = tensor.double().flatten()
    mean_size = float(g.abs().mean())
    return {
        "norm": float(g.norm()),
        "std": float(g.std(correction=0)),
        "gvc": float(g.std(correction=0)) / mean_size if mean_size else 0.0,
        "largest": float(g.abs().max()),
    }


@pytest.mark.parametrize("shape", [(1,), (7, 3), (RUN,), (RUN + 1,), (3, RUN // 2 + 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_norm_spread_and_maximum_are_those_of_the_whole_tensor(shape, dtype):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 0.5).to(dtype)
    found = statistics_of([tensor])
    expected = reference(tensor)
    assert found.count == tensor.numel()
    assert found.norm == pytest.approx(expected["norm"], rel=3e-7)
    assert found.largest == pytest.approx(expected["largest"], rel=1e-7)
    if tensor.numel() > 1:
        assert found.std == pytest.approx(expected["std"], rel=3e-7)
        assert found.gvc() == pytest.approx(expected["gvc"], rel=3e-7)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-24, 1e-12, 1e12, 1e19, 1e30, 3e37])
def test_gradients_whose_squares_leave_fp32_have_their_norm(scale):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * scale
    found = statistics_of([tensor])
    assert found.non_finite == 0
    assert found.norm == pytest.approx(reference(tensor)["norm"], rel=1e-6)
    assert found.gvc() == pytest.approx(reference(tensor)["gvc"], rel=1e-6)


def test_a_gradient_of_zeros_has_no_spread():
    found = statistics_of([torch.zeros(100)])
    assert (found.norm, found.std, found.gvc()) == (0.0, 0.0, 0.0)
    assert statistics_of([torch.empty(0)]).gvc() == 0.0


def test_a_constant_gradient_has_hardly_any_spread():
    assert statistics_of([torch.full((5000,), 0.1)]).gvc() < 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_elements_that_are_not_finite_are_counted_and_spoil_the_norm(bad):
    tensor = torch.ones(RUN + 10)
    tensor[[3, RUN + 2]] = bad
    found = statistics_of([tensor, torch.ones(4)])
    assert found.non_finite == 2
    assert not math.isfinite(found.norm)


def test_what_is_known_of_a_scaled_gradient_is_that_of_the_scaled_gradient():
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(3)) + 1
    scaled, direct = statistics_of([tensor]).scaled(-0.25), statistics_of([tensor * -0.25])
    for name in ("count", "total", "absolute", "squares", "largest"):
        assert getattr(scaled, name) == pytest.approx(getattr(direct, name), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40_000), max_size=6),
    replicas=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 5),
)
def test_shards_and_replicas_add_up_to_the_whole(cuts, replicas, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(40_000, generator=generator) * torch.rand(40_000, generator=generator) ** 4
    whole = statistics_of([tensor])
    edges = sorted({0, 40_000, *cuts})
    ranks = []
    for first, last in itertools.pairwise(edges):
        for _ in range(replicas):  # each shard is held by as many ranks, and is to count once
            sums = GradientSums(2)
            sums.add(1, tensor[first:last], 1.0 / replicas)
            ranks.append(sums.read())
    total = sum((sums for sums, _ in ranks), torch.zeros(2, 5, dtype=torch.float64))
    largest = torch.stack([top for _, top in ranks]).amax(0)
    nothing, found = from_rows(total, largest)
    assert nothing.count == 0
    assert found.count == pytest.approx(40_000, rel=1e-12)
    assert found.largest == whole.largest
    assert found.norm == pytest.approx(whole.norm, rel=5e-7)
    assert found.gvc() == pytest.approx(whole.gvc(), rel=5e-7)


def test_many_small_tensors_are_one_gradient():
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(size, generator=generator) for size in (1, 5, 300, 16_384, 16_385, 70_000)]
    sums = GradientSums(1)
    for tensor in tensors:
        sums.add(0, tensor)
    (found,) = from_rows(*sums.read())
    assert found.norm == pytest.approx(reference(torch.cat(tensors))["norm"], rel=3e-7)
