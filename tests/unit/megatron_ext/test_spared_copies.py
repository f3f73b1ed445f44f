"""Copies that stock makes for a checkpoint: late where they are needed, none where what was loaded lies together."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megascale_omni.checkpoint.scratch import DenseScratch
from megatron_ext import spared_copies
from megatron_ext.spared_copies import OneByOne, WithoutData, join_in_place, with_data


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """What a factory of stock's joins parts to, once it joins in place."""
    factory = SimpleNamespace(merge_fn=torch.cat)
    join_in_place(factory)
    result: torch.Tensor = factory.merge_fn(parts)
    return result


@pytest.mark.parametrize("shape", [(6, 5), (4,), (2, 3, 4)])
def test_halves_of_a_tensor_are_that_tensor(shape: tuple[int, ...]) -> None:
    memory = torch.arange(3 * torch.Size(shape).numel()).view(3 * shape[0], *shape[1:])
    whole = memory[shape[0] : 2 * shape[0]]
    result = joined([*whole.chunk(2)])
    assert result.data_ptr() == whole.data_ptr()
    assert torch.equal(result, whole)


@pytest.mark.parametrize(
    "choose",
    [
        lambda a: [a[3:], a[:3]],
        lambda a: [a[:2], a[3:]],
        lambda a: [a[:3], a[3:].clone()],
        lambda a: [*a.t().contiguous().t().chunk(2)],
    ],
    ids=["other order", "gap", "elsewhere", "not contiguous"],
)
def test_others_are_joined_by_stock(choose) -> None:
    parts = choose(torch.arange(30.0).view(6, 5))
    result = joined(parts)
    assert torch.equal(result, torch.cat(parts))
    assert result.untyped_storage().data_ptr() not in {part.untyped_storage().data_ptr() for part in parts}


def test_a_plan_has_no_data_and_gets_it_back_as_views() -> None:
    whole = torch.arange(8.0)
    planner = SimpleNamespace(resolve_data={"half": whole[:4], "whole": whole}.__getitem__)
    half = WithoutData(planner).resolve_data("half")
    assert isinstance(half, torch.Tensor)
    assert half.is_meta
    of_device, none = torch.ones(1), torch.empty(0, device="meta")
    planned = [("file", "key", ([("object", b"")], [("half", none), ("whole", none), ("other", of_device)]))]
    ((_, _, (objects, tensors)),) = with_data(planned, planner)
    assert objects == [("object", b"")]
    assert [tensor.data_ptr() for _, tensor in tensors] == [whole.data_ptr()] * 2 + [of_device.data_ptr()]


def test_beside_training_only_what_was_made_for_the_save_is_without_data(tmp_path: Path) -> None:
    trained, scratch = torch.ones(6), DenseScratch(tmp_path)
    made = scratch({"a": (4, 2), "b": (6,)}, torch.float32)
    scratch.settle()
    planner = SimpleNamespace(resolve_data={"trained": trained[:3], "a": made["a"][2:], "b": made["b"]}.__getitem__)
    planned = {name: WithoutData(planner, scratch.holds).resolve_data(name) for name in ("trained", "a", "b")}
    assert {name: isinstance(t, torch.Tensor) and t.is_meta for name, t in planned.items()} == {
        "trained": False,
        "a": True,
        "b": True,
    }
    ((_, _, (_, tensors)),) = with_data([("file", "key", ([], list(planned.items())))], planner)
    assert [found.data_ptr() for _, found in tensors] == [
        trained.data_ptr(),
        made["a"][2:].data_ptr(),
        made["b"].data_ptr(),
    ]
    del planner, tensors, planned, made
    gc.collect()
    assert not scratch._places, "nothing of it is kept"


def test_parts_are_copied_when_their_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spared_copies, "RELEASE_BYTES", 48)
    whole, released = torch.zeros(8), []
    pairs = iter(OneByOne([("first", whole[:4]), ("second", whole[4:]), ("whole", whole)], lambda: released.append(1)))
    assert next(pairs)[1].untyped_storage().nbytes() == 16, "else all of the tensor would be written"
    whole.fill_(1)
    assert next(pairs)[1].sum() == 4, "not copied before its turn"
    assert next(pairs)[1] is whole
    assert [*pairs] == []
    assert len(released) == 2
