"""However pages come and go, results have the same bits: what is computed together follows from layout and routing."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.paging.manager import ExpertManager, PagedModule, Wave, cut_batches
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import CPU, FFN, GELU, PRODUCTS, SWIGLU, Batch, paged, random_batch, small_experts
from tests.unit.experts.reference import Tensors


class OneBatchAWave(ExpertManager):
    """Yields each batch as a wave of its own and, after each, moves all weight pages to other slots (at random)."""

    def waves(self, module: PagedModule, experts: Sequence[int], *, planes: Sequence[Plane]) -> Iterator[Wave]:
        for batch in cut_batches(module.layout, dtype=module.dtypes[Plane.WEIGHT], experts=experts):
            pages = {plane: self.page_ids_of(module, plane, batch) for plane in planes}
            leases = {plane: self.lease_ids(module, plane, ids) for plane, ids in pages.items()}
            yield Wave(batches=(batch,), leases=leases)
            for lease in leases.values():
                lease.release()
            self.move_weights(module)

    def page_ids_of(self, module: PagedModule, plane: Plane, batch: Sequence[tuple[int, int]]):
        wanted = set(batch)
        slices = module.entry.num_slices
        experts = sorted({expert for expert, _ in batch})
        ids = self.ids(module, plane, experts).reshape(len(experts), slices)
        mask = [[(expert, slice_) in wanted for slice_ in range(slices)] for expert in experts]
        return ids[torch.tensor(mask).numpy()]

    def move_weights(self, module: PagedModule) -> None:
        ids = self.ids(module, Plane.WEIGHT, range(module.entry.num_experts))
        contents = [self.page_tensor(i).clone() for i in ids.tolist()]
        self.drop(ids)
        self.create_ids(module, Plane.WEIGHT, ids[torch.randperm(len(ids)).numpy()])
        for page_id, content in zip(ids.tolist(), contents, strict=True):
            self.page_tensor(page_id).copy_(content)


def results(make: Callable[[ExpertManager], PagedExperts], manager: ExpertManager, seed: int, batch: Batch) -> Tensors:
    torch.manual_seed(seed)
    experts = make(manager)
    first = paged(experts, batch)
    second = paged(experts, batch)  # gradients are added to those of the first
    return {f"{when} {name}": t for when, run in (("first", first), ("second", second)) for name, t in run.items()}


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=["gated", "ungated"])
@pytest.mark.parametrize("rows", [16, 20, FFN], ids=["short last page", "equal pages", "whole expert"])
def test_waves_cut_differently_give_the_same_bits(monkeypatch, seed, rows, activation, dtype, products):
    monkeypatch.setattr("megascale_omni.paging.manager.BATCH_BYTES", 8 * 1024)  # a few small pages a batch
    batch = random_batch((7, 0, 33, 1), dtype=dtype)

    def make(manager: ExpertManager) -> PagedExperts:
        return small_experts(activation, rows=rows, bias=True, dtype=dtype, products=products, manager=manager)

    expected = results(make, ExpertManager(device=CPU, poison=True), seed, batch)
    found = results(make, OneBatchAWave(device=CPU, poison=True), seed, batch)
    assert [name for name in expected if not found[name].equal(expected[name])] == []


def test_batches_are_the_same_in_forward_and_backward_and_follow_the_active_experts():
    class Recording(ExpertManager):
        seen: list[tuple[tuple[tuple[int, int], ...], ...]]

        def waves(self, module: PagedModule, experts: Sequence[int], *, planes: Sequence[Plane]) -> Iterator[Wave]:
            for wave in super().waves(module, experts, planes=planes):
                self.seen.append(wave.batches)
                yield wave

    manager = Recording(device=CPU, poison=True)
    manager.seen = []
    experts = small_experts(manager=manager)
    paged(experts, random_batch((7, 0, 33, 1)))
    expected = cut_batches(experts.layout, dtype=torch.float32, experts=[0, 2, 3])
    assert manager.seen == [expected, expected]
    assert expected[:3] == (((0, 0), (0, 1)), ((0, 2),), ((2, 0), (2, 1)))
