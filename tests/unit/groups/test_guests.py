"""Visitors of modules that are alike are computed in one room; others have one of their own."""

import dataclasses

import torch

from megascale_omni.experts.module import PagedExperts
from megascale_omni.experts.torch_backend import TorchBackend
from megascale_omni.groups.guests import GuestHouse
from megascale_omni.groups.plan import PAGE_BATCH
from megascale_omni.paging.planes import Plane
from tests.unit.experts.paged import small_experts


def test_modules_that_are_alike_share_a_room_which_trains_as_they_do():
    backend = TorchBackend()
    layers: list[PagedExperts] = []
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        experts = small_experts(dtype=dtype, backend=backend)
        if layers:  # as in a run, where all modules share the scratch memory
            experts.context = dataclasses.replace(experts.context, workspace=layers[0].context.workspace)
        layers.append(experts)
    house = GuestHouse()
    first = house.room(layers[0])
    assert house.room(layers[1]) is first
    assert house.room(layers[2]) is not first
    assert house.num_rooms == 2
    assert first.num_experts == PAGE_BATCH
    assert house.room(layers[2]).pages.dtypes[Plane.GRADIENT] is torch.float32
    layers[1].requires_grad_(False)
    assert not house.room(layers[1]).trainable
    assert house.room(layers[0]).trainable
