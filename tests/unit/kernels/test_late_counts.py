"""What goes wrong while numbers of tokens are on their way leaves nothing behind that is taken for a gradient."""

from unittest import mock

import numpy as np
import pytest
import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.tokens import rows_of_map
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import HIDDEN, active_experts, gradients, leaf
from tests.unit.kernels.test_backend import kernel_experts
from tests.unit.kernels.test_waits import TOPK, Late, Routes, computed, differences, map_of


def layer(experts: PagedExperts, routes: Routes) -> torch.Tensor:
    map_ET = map_of(routes, experts.num_experts)
    _, index_N = rows_of_map(map_ET, TOPK * len(routes))
    return experts(leaf(torch.randn(len(routes), HIDDEN)), Late(map_ET.sum(1)), None, index_N)


GRADIENTS = "megascale_omni.kernels.backend.launch_weight_gradient"


def test_a_micro_batch_that_fails_and_is_tried_again_adds_to_no_page_that_nobody_wrote(seed):
    found = []
    for fails in (False, True):
        torch.manual_seed(seed)
        experts = kernel_experts(rows=16, ffn=16)
        computed(experts, [[0, 2], [2]], ahead=True)
        if fails:
            with mock.patch(GRADIENTS, side_effect=MemoryError), pytest.raises(MemoryError):
                computed(experts, [[1, 3]] * 3, ahead=True)
        computed(experts, [[1, 3]] * 3, ahead=True)
        found.append(gradients(experts))
    assert differences(found[1], found[0]) == []


def test_a_snapshot_that_fails_leaves_no_gradient_page():
    experts = kernel_experts()
    y = layer(experts, [[1, 2]])
    assert active_experts(experts) == []
    fails = mock.patch.object(experts.manager, "before_write", side_effect=OSError("no room"))
    with fails, pytest.raises(OSError, match="no room"):
        y.sum().backward()
    assert active_experts(experts) == []
    assert not experts.manager.table.pins.any()


def test_a_page_that_nobody_wrote_is_new_to_who_makes_it():
    experts = kernel_experts()
    computed(experts, [[1, 2]], ahead=True)
    ids = experts.manager.ids(experts.pages, Plane.GRADIENT, [0, 1])
    slices = experts.layout.num_slices
    assert experts.manager.create_ids(experts.pages, Plane.GRADIENT, ids).tolist() == ids[:slices].tolist()


class Strange(Late):
    """Numbers with a token of an expert that is not there."""

    def wait(self) -> list[int]:
        super().wait()
        raise ValueError("the router chose expert 9 of 4")


@pytest.mark.parametrize("last", [False, True])
def test_numbers_that_cannot_be_are_told_to_all_who_ask_for_gradients(monkeypatch, last):
    experts = kernel_experts()
    computed(experts, [[0]], ahead=True)
    with monkeypatch.context() as patched:
        patched.setattr("tests.unit.kernels.test_waits.Late", Strange)
        computed(experts, [[0, 1]], ahead=True)
    if not last:
        computed(experts, [[0]], ahead=True)
    for _ in range(3):
        with pytest.raises(ValueError, match="the router chose expert 9 of 4"):
            experts.manager.present(experts.pages, Plane.GRADIENT)


def test_more_tokens_than_there_is_room_for_are_told_of_as_long_as_somebody_asks():
    experts = kernel_experts()
    computed(experts, [[0, 1, 2, 3], [0, 1, 2]], ahead=True)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="nothing of them was computed"):
            experts.manager.present(experts.pages, Plane.GRADIENT)


def test_addresses_are_made_anew_for_the_module_and_plane_of_which_a_page_has_moved():
    one = kernel_experts()
    two = kernel_experts(manager=one.manager)
    manager, known = one.manager, [(0, Plane.WEIGHT), (1, Plane.WEIGHT), (1, Plane.GRADIENT)]
    manager.create(two.pages, Plane.GRADIENT, range(4))
    for module, plane in known:
        manager.whole._table(manager.modules[module], plane)
    for page in (Plane.GRADIENT, Plane.WEIGHT):
        moved = int(manager.ids(two.pages, page, [3])[-1])
        before = manager.page_tensor(moved).data_ptr()
        slot_class = manager.table.slot_class(moved)
        manager.pager.relocate([(moved, manager.arena.spare_slot(slot_class, ()))])
        known.remove((1, page))
        assert list(manager.whole._addresses) == known
        table = manager.whole._table(two.pages, page)
        assert before != manager.page_tensor(moved).data_ptr() == table[-1]
        manager.whole._addresses.pop((1, page))
    indices = np.arange(manager.numbering.num_indices)
    assert [*map(manager.numbering.module_of, indices.tolist())] == manager.numbering.modules_of(indices).tolist()
