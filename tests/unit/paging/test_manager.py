"""The manager of pages: leases, batches, planes, and an integrity check that finds what it is for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale_omni.paging.batches import BATCH_BYTES, cut_batches
from megascale_omni.paging.layout import KIB, ExpertShape, PageLayout
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import ArenaFull, TierKind

FP32 = torch.float32
LAYOUT = PageLayout(ExpertShape(hidden=512, ffn=40, gated=False, bias=True), 16)  # 64 KiB a page; 16, 16, 8 neurons


def manager_with_pages(experts: int = 2) -> tuple[ExpertManager, PagedModule]:
    manager = ExpertManager(device=torch.device("cpu"), poison=True)
    dtypes = {Plane.WEIGHT: FP32, Plane.GRADIENT: FP32}
    module = manager.add_module(path="experts", layout=LAYOUT, num_experts=experts, dtypes=dtypes)
    manager.create(module, Plane.WEIGHT, range(experts))
    return manager, module


def test_a_lease_gives_pages_without_the_unused_tail_of_their_slots():
    manager, module = manager_with_pages()
    with manager.lease(module, Plane.WEIGHT, [0]) as lease:
        assert [lease.page(0, s).numel() for s in range(3)] == [LAYOUT.page_numel(s) for s in range(3)]
        for slice_ in range(3):
            views, parts = lease.views(0, slice_), LAYOUT.views(lease.page(0, slice_), slice_)
            assert views.down_rh.data_ptr() == parts.down_rh.data_ptr()
            assert views.down_rh.shape == parts.down_rh.shape


def test_pages_outside_a_lease_or_after_it_are_refused():
    manager, module = manager_with_pages()
    lease = manager.lease(module, Plane.WEIGHT, [0])
    for use in (lease.page, lease.views):
        with pytest.raises(RuntimeError, match="weight page of experts, expert 1, slice 0 is used without a lease"):
            use(1, 0)
    lease.release()
    with pytest.raises(RuntimeError, match="expert 0, slice 2 is used without a lease"):
        lease.page(0, 2)


def test_a_lease_ends_with_its_block_also_by_an_error():
    manager, module = manager_with_pages()

    def work() -> None:
        with manager.lease(module, Plane.WEIGHT, [0, 1]):
            assert manager.table.pins.sum() == 6
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert not manager.table.pins.any()


def test_an_error_inside_a_wave_leaves_no_page_pinned():
    manager, module = manager_with_pages()

    def work() -> None:
        for _ in manager.waves(module, [0, 1], planes=[Plane.WEIGHT]):
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert not manager.table.pins.any()


def test_no_experts_are_no_waves():
    manager, module = manager_with_pages()
    assert not list(manager.waves(module, [], planes=[Plane.WEIGHT, Plane.GRADIENT]))
    assert not len(manager.create(module, Plane.GRADIENT, []))


def test_views_follow_a_page_to_its_new_slot():
    manager, module = manager_with_pages()
    for expert in (0, 1):
        with manager.lease(module, Plane.WEIGHT, [expert]) as lease:
            lease.views(expert, 0)
    pages = manager.ids(module, Plane.WEIGHT, [0, 1])
    manager.drop(pages)
    manager.create(module, Plane.WEIGHT, [1])  # gets the slots that expert 0 had
    manager.create(module, Plane.WEIGHT, [0])
    with manager.lease(module, Plane.WEIGHT, [0, 1]) as lease:
        for expert in (0, 1):
            assert lease.views(expert, 0).fc1_Rh.data_ptr() == lease.page(expert, 0).data_ptr()


def test_pages_of_different_dtypes_do_not_share_slots():
    manager, module = manager_with_pages()
    manager.set_plane_dtype(module, Plane.MASTER, torch.bfloat16)
    manager.create(module, Plane.MASTER, [0])
    with manager.lease(module, Plane.MASTER, [0]) as lease:
        assert lease.page(0, 0).dtype is torch.bfloat16
    assert manager.resident_bytes()["master"] == 3 * module.slot_class(Plane.MASTER).nbytes
    manager.check_integrity()


def test_a_plane_changes_its_dtype_only_while_it_has_no_pages():
    manager, module = manager_with_pages()
    with pytest.raises(RuntimeError, match=r"experts: the weight plane has pages in torch\.float32"):
        manager.set_plane_dtype(module, Plane.WEIGHT, torch.bfloat16)
    manager.set_plane_dtype(module, Plane.WEIGHT, FP32)
    manager.set_plane_dtype(module, Plane.GRADIENT, torch.bfloat16)
    assert module.slot_class(Plane.GRADIENT).dtype is torch.bfloat16


def test_a_budget_stops_creation_and_leaves_the_books_in_order():
    manager, module = manager_with_pages(experts=3)
    manager.arena.set_limit(module.slot_class(Plane.WEIGHT), 20)  # room for the gradients of three experts, and two
    manager.create(module, Plane.GRADIENT, [0, 1, 2])
    manager.set_plane_dtype(module, Plane.MOMENT1, FP32)
    with pytest.raises(ArenaFull, match=r"device arena: all 20 slots of .* are taken"):
        manager.create(module, Plane.MOMENT1, [0])
    manager.check_integrity()
    assert not manager.table.pins.any()
    assert not manager.present(module, Plane.MOMENT1).any()


# -- batches -----------------------------------------------------------------------------------------------------------


@given(
    hidden=st.sampled_from([64, 512, 4096]),
    ffn=st.integers(1, 100),
    experts=st.lists(st.integers(0, 40), unique=True).map(sorted),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_batches_hold_all_pages_in_order_each_of_one_width_within_the_limit(hidden, ffn, experts, dtype):
    layout = PageLayout(ExpertShape(hidden=hidden, ffn=ffn, gated=True, bias=False), min(16, ffn))
    batches = cut_batches(layout, dtype=dtype, experts=experts)
    assert [item for batch in batches for item in batch] == [(e, s) for e in experts for s in range(layout.num_slices)]
    for batch in batches:
        assert len({layout.rows_of(slice_) for _, slice_ in batch}) == 1
        assert len(batch) == 1 or len(batch) * layout.slot_class(dtype).nbytes <= BATCH_BYTES
    widths = [layout.rows_of(batch[0][1]) for batch in batches]
    for batch, width, following in zip(batches, widths, widths[1:], strict=False):  # no batch ends early
        assert width != following or (len(batch) + 1) * layout.slot_class(dtype).nbytes > BATCH_BYTES


def test_batches_do_not_depend_on_what_is_resident_or_pinned():
    manager, module = manager_with_pages()
    expected = cut_batches(LAYOUT, dtype=FP32, experts=[0, 1])
    held = manager.lease(module, Plane.WEIGHT, [1])
    manager.create(module, Plane.GRADIENT, [1])
    waves = tuple(wave.items for wave in manager.waves(module, [0, 1], planes=[Plane.WEIGHT]))
    assert waves == expected == (((0, 0), (0, 1)), ((0, 2),), ((1, 0), (1, 1)), ((1, 2),))
    held.release()


def test_a_page_larger_than_a_batch_is_a_batch():
    layout = PageLayout(ExpertShape(hidden=64 * KIB, ffn=32, gated=True, bias=False), 16)
    assert cut_batches(layout, dtype=FP32, experts=[3]) == (((3, 0),), ((3, 1),))
    two = 2 * layout.slot_class(FP32).nbytes
    assert cut_batches(layout, dtype=FP32, experts=[3], nbytes=two) == (((3, 0), (3, 1)),)


# -- the integrity check can fail --------------------------------------------------------------------------------------


def weight_page(module: PagedModule, expert: int) -> int:
    return (module.entry.first_index + expert * module.entry.num_slices) * len(Plane)


def two_owners(manager: ExpertManager, module: PagedModule) -> None:
    manager.table.slot[weight_page(module, 1)] = manager.table.slot[weight_page(module, 0)]


def owner_forgotten(manager: ExpertManager, module: PagedModule) -> None:
    manager.table.tier[weight_page(module, 1)] = TierKind.ABSENT


def slot_not_taken(manager: ExpertManager, module: PagedModule) -> None:
    manager.table.slot[weight_page(module, 1)] = 11


def slot_freed_under_its_page(manager: ExpertManager, module: PagedModule) -> None:
    manager.arena.free(module.slot_class(Plane.WEIGHT), 2)


def pinned_but_absent(manager: ExpertManager, module: PagedModule) -> None:
    manager.table.pins[weight_page(module, 0) + Plane.GRADIENT] = 1


def released_too_often(manager: ExpertManager, module: PagedModule) -> None:
    manager.table.pins[weight_page(module, 0)] = -1


def slot_free_twice(manager: ExpertManager, module: PagedModule) -> None:
    manager.arena._spaces[module.slot_class(Plane.WEIGHT)].free *= 2


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (
            two_owners,
            "slot 0 of .* has two owners: weight page of experts, expert 0, slice 0 and .* expert 1, slice 0",
        ),
        (owner_forgotten, "slots owned by pages = slots taken does not hold: 5 != 6"),
        (slot_not_taken, "slots owned by pages = slots taken does not hold"),
        (slot_freed_under_its_page, "slots owned by pages = slots taken does not hold: 6 != 5"),
        (pinned_but_absent, "gradient page of experts, expert 0, slice 0 is pinned but not ACTIVE"),
        (slot_free_twice, r"used \+ free = capacity does not hold: 6 \+ 114 != 120 .*228 entries in the free"),
        (released_too_often, "a page has a negative pin count"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_broken_invariants_are_found(corrupt, message):
    manager, module = manager_with_pages()
    manager.check_integrity()
    corrupt(manager, module)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity()


def test_ids_of_pages_come_back_as_numpy_so_that_sets_of_pages_stay_cheap():
    manager, module = manager_with_pages()
    ids = manager.ids(module, Plane.GRADIENT, [1, 0])
    assert isinstance(ids, np.ndarray)
    assert ids.tolist() == [16, 21, 26, 1, 6, 11]
