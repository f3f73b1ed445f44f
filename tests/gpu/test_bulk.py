"""Bulk work on an accelerator: kernels make the bits of torch's own kernels there, and torch's are what is compared."""

from types import SimpleNamespace

import pytest
import torch

from megascale_omni.bulk import TORCH, bulk_for
from megascale_omni.experts.combine import Combine
from megascale_omni.kernels.interpreter import is_interpreted
from megascale_omni.paging.copies import FEWEST, StreamCopier
from megascale_omni.paging.streams import CudaStreams
from megascale_omni.paging.word_sums import word_sums

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(is_interpreted(), reason="kernels are interpreted: run scripts/gpu_check.sh")

CUDA = torch.device("cuda")


def pages(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return list(torch.randn(count, numel, device=CUDA).to(dtype))


def test_kernels_are_chosen_here():
    assert bulk_for(CUDA).name == "triton"
    assert bulk_for(CUDA, choice="torch").name == "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_bits_of_torch_whoever_has_the_factor(dtype):
    for factors in ([0.3, 1.0], [torch.tensor(0.77), 0.1], [torch.tensor(0.77, device=CUDA), 0.1]):
        groups = [pages(3, 5000, dtype), pages(1, 77, dtype)]
        expected = [[page.clone() for page in group] for group in groups]
        bulk_for(CUDA).scale(groups, factors)  # type: ignore[arg-type]
        TORCH.scale(expected, factors)  # type: ignore[arg-type]
        for group, others in zip(groups, expected, strict=True):
            assert all(map(torch.equal, group, others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_taken_and_summed_in_the_bits_of_torch(dtype):
    values, items = torch.randn(300, 1040, device=CUDA).to(dtype), torch.randperm(300, device=CUDA)
    starts = torch.tensor([0, 3, 3, 7, 100], device=CUDA)
    for each in ("take_rows", "sum_segments"):
        more = (items,) if each == "take_rows" else (items, starts)
        assert torch.equal(getattr(bulk_for(CUDA), each)(values, *more), getattr(TORCH, each)(values, *more)), each


def test_the_wire_and_copies_have_the_bits_of_torch():
    gradients, found = pages(5, 3000), []
    for bulk in (bulk_for(CUDA), TORCH):
        wire, back = torch.empty(15000, dtype=torch.bfloat16, device=CUDA), [g.clone() for g in gradients]
        bulk.pack(gradients, wire)
        bulk.unpack(wire, back, add=True)
        copies = [torch.empty_like(page) for page in back]
        bulk.copy(list(zip(back, copies, strict=True)))
        found.append([wire, *copies])
    assert all(map(torch.equal, *found))


def test_checksums_are_those_of_the_host():
    given = pages(3, 70_001)
    sums = bulk_for(CUDA).checksums(given)
    assert sums is not None
    assert sums.tolist() == [list(word_sums(page.cpu())) for page in given]


def test_small_pages_are_gathered_and_scattered_on_the_streams_of_their_copies():
    bulk = bulk_for(CUDA)
    moved: list[int] = []

    def copy(pairs):
        moved.append(len(pairs))
        bulk.copy(pairs)

    counting = SimpleNamespace(name="counting", copy=copy, checksums=bulk.checksums)
    copier = StreamCopier(CudaStreams(CUDA), counting)  # type: ignore[arg-type]
    host, device = torch.randn(4 * FEWEST, 4096).pin_memory(), torch.zeros(100, 4096, device=CUDA)
    places = torch.randperm(100)[: len(host)].tolist()
    slots = [device[place] for place in places]
    copier.load(list(zip(host, slots, strict=True)))
    copier.acquired(slots)
    assert torch.equal(device[places].cpu(), host)
    back = torch.zeros_like(host).pin_memory()
    copier.released(slots)
    copier.save(list(zip(slots, back, strict=True)))
    assert torch.equal(back, host)
    assert moved == [len(host)] * 2


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sums_are_those_of_a_model_that_multiplies_and_adds(dtype, each):
    from megascale_omni.kernels.permute_rows import unpermute

    index = torch.rand(50, 8, device=CUDA).topk(2).indices
    combine, weights = Combine.of_routing(index, each=each), torch.rand(50, 2, device=CUDA).to(dtype)
    y = torch.randn(100, 1040, device=CUDA).to(dtype)
    weight_N = weights.reshape(-1)[combine.order_N]
    weighted = (y * weight_N.unsqueeze(-1))[combine.position_Tk]
    expected = weighted.sum(1) if not each else weighted[:, 0] + weighted[:, 1]
    found = unpermute(y, combine.position_Tk, weight=weight_N[combine.position_Tk], each=each)
    assert torch.equal(found, expected.to(dtype))
