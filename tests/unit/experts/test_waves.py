"""However pages come and go, results have the same bits: what is computed together follows from layout and routing."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.paging.batches import Batch as PageBatch
from megascale_omni.paging.batches import cut_batches
from megascale_omni.paging.leases import PagedModule, Wave
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import CPU, FFN, GELU, PRODUCTS, SWIGLU, Batch, paged, random_batch, small_experts
from tests.unit.experts.reference import Tensors


class MovesBetweenWaves(ExpertManager):
    """Between waves, moves every weight page to another slot."""

    def waves(self, module: PagedModule, experts: Sequence[int], **options: Any) -> Iterator[Wave]:
        for wave in super().waves(module, experts, **options):
            yield wave
            for lease in wave.leases.values():
                lease.release()
            self.move_weights(module)

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
def test_pages_that_move_between_waves_give_the_same_bits(monkeypatch, seed, rows, activation, dtype, products):
    monkeypatch.setattr("megascale_omni.paging.batches.BATCH_BYTES", 8 * 1024)  # a few small pages a batch
    batch = random_batch((7, 0, 33, 1), dtype=dtype)

    def make(manager: ExpertManager) -> PagedExperts:
        return small_experts(activation, rows=rows, bias=True, dtype=dtype, products=products, manager=manager)

    expected = results(make, ExpertManager(device=CPU, poison=True), seed, batch)
    found = results(make, MovesBetweenWaves(device=CPU, poison=True), seed, batch)
    assert [name for name in expected if not found[name].equal(expected[name])] == []


def test_batches_are_the_same_in_forward_and_backward_and_follow_the_active_experts():
    class Recording(ExpertManager):
        seen: list[PageBatch]

        def waves(self, module: PagedModule, experts: Sequence[int], **options: Any) -> Iterator[Wave]:
            for wave in super().waves(module, experts, **options):
                self.seen.append(wave.items)
                yield wave

    manager = Recording(device=CPU, poison=True)
    manager.seen = []
    experts = small_experts(manager=manager)
    paged(experts, random_batch((7, 0, 33, 1)))
    expected = cut_batches(experts.layout, dtype=torch.float32, experts=[0, 2, 3])
    assert manager.seen == [*expected, *expected]
    assert expected[:3] == (((0, 0), (0, 1)), ((0, 2),), ((2, 0), (2, 1)))
