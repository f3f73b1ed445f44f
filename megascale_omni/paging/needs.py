"""What modules need of a budget: how many pages there are, and how many must be in the device arena at once."""

from __future__ import annotations

from collections.abc import Sequence

from megascale_omni.paging.batches import batch_pages
from megascale_omni.paging.budget import Budget, ClassNeed, smallest_budget
from megascale_omni.paging.layout import MIN_PAGE_BYTES, SlotClass
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.planes import Plane


def class_needs(modules: Sequence[PagedModule]) -> dict[SlotClass, ClassNeed]:
    """Pages and floor of every slot class.

    The floor is two of the largest groups that are worked on together: a batch in the backward (weights and gradients),
    a page in the optimizer (weights, gradient, master, moments).
    """
    pages: dict[SlotClass, int] = {}
    floors: dict[SlotClass, int] = {}
    for module in modules:
        batch = batch_pages(module.layout, module.dtypes[Plane.WEIGHT])
        together: dict[SlotClass, int] = {}
        single: dict[SlotClass, int] = {}
        for plane in module.dtypes:
            slot_class = module.slot_class(plane)
            pages[slot_class] = pages.get(slot_class, 0) + module.entry.num_pages
            single[slot_class] = single.get(slot_class, 0) + 1
            if plane in (Plane.WEIGHT, Plane.GRADIENT):
                together[slot_class] = together.get(slot_class, 0) + min(batch, module.entry.num_pages)
        for slot_class, count in single.items():
            floor = 2 * max(count, together.get(slot_class, 0))
            floors[slot_class] = max(floors.get(slot_class, 0), floor)
    return {c: ClassNeed(pages[c], floors[c]) for c in pages}


def check_budget(budget: Budget, needs: dict[SlotClass, ClassNeed]) -> None:
    """Raises ValueError where the device budget is too small; names the number that works."""
    total = sum(need.pages * c.nbytes for c, need in needs.items())
    given, smallest = budget.bytes_of(total), smallest_budget(needs)
    if given < smallest:
        smaller = any(c.nbytes > MIN_PAGE_BYTES for c in needs)
        raise ValueError(
            f"device budget {given} bytes is too small: the largest group of pages worked on together needs {smallest} "
            f"bytes ({100 * smallest / total:.1f}% of all pages); use --megascale-device-budget {smallest} or more"
            + (", or smaller pages (--megascale-page-size)" if smaller else "")
        )
