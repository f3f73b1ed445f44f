"""The slots of a traced model: classes of its pages, and how many slots a budget gives each class."""

from __future__ import annotations

import re

import torch

from megascale_omni.paging.budget import Budget, ClassNeed, share, smallest_budget
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.trace import TracedModel


def page_classes(model: TracedModel) -> dict[int, SlotClass]:
    """The slot class of every page id that its module has."""
    classes: dict[int, SlotClass] = {}
    first = 0
    for module in model.modules:
        for name, kind in module.slot_kind.items():
            slot_class, plane = _slot_class(kind), int(Plane[name.upper()])
            for index in range(first, first + module.experts * module.slices):
                classes[index * NUM_PLANES + plane] = slot_class
        first += module.experts * module.slices
    return classes


def _slot_class(kind: str) -> SlotClass:
    match = re.fullmatch(r"(\w+) x ([1-9]\d{0,17})", kind)
    dtype = None if match is None else getattr(torch, match[1], None)
    if match is None or not isinstance(dtype, torch.dtype):
        raise ValueError(f"the trace has pages of {kind!r}, which is no dtype and number of elements; record it again")
    return SlotClass(dtype, int(match[2]))


def needs_of(model: TracedModel) -> dict[SlotClass, ClassNeed]:
    """Pages and floor of every slot class of a trace."""
    needs: dict[SlotClass, ClassNeed] = {}
    for module in model.modules:
        for name, kind in module.slot_kind.items():
            known = needs.get(_slot_class(kind), ClassNeed(0, 0))
            pages = known.pages + module.experts * module.slices
            needs[_slot_class(kind)] = ClassNeed(pages, max(known.floor, module.floor_pages[name]))
    return needs


def slots_of(model: TracedModel, budget: Budget) -> dict[SlotClass, int]:
    """Slots of every class under a budget.

    Raises:
        ValueError: the budget is below the smallest one; names the number that works.
    """
    needs = needs_of(model)
    smallest, given = smallest_budget(needs), budget.bytes_of(model.total_bytes)
    if given < smallest:
        raise ValueError(
            f"budget {given} bytes is too small for this model: {smallest} bytes are needed "
            f"({100 * smallest / model.total_bytes:.1f}% of all pages)"
        )
    return share(budget, needs)
