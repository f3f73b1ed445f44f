"""How a byte budget is shared by slot classes: pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megascale_omni.paging.layout import SlotClass


@dataclass(frozen=True)
class Budget:
    """Bytes of memory for pages: ``nbytes``, or ``fraction`` of all pages there are; both None: everything."""

    nbytes: int | None = None
    fraction: float | None = None

    def bytes_of(self, total: int) -> int:
        """The budget in bytes when all pages together have ``total``."""
        if self.nbytes is not None:
            return self.nbytes
        return total if self.fraction is None else int(total * self.fraction)


@dataclass(frozen=True)
class ClassNeed:
    """What a slot class holds at most (``pages``), and the slots without which no module can work (``floor``)."""

    pages: int
    floor: int


def parse_percent(text: str) -> float | None:
    """``25%`` as 0.25; None where the text is no percentage."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    return None if match is None else float(match[1]) / 100


def smallest_budget(needs: Mapping[SlotClass, ClassNeed]) -> int:
    """Bytes below which some module could not work."""
    return sum(min(need.floor, need.pages) * c.nbytes for c, need in needs.items())


def share(budget: Budget, needs: Mapping[SlotClass, ClassNeed]) -> dict[SlotClass, int]:
    """Slots for each class: in proportion to its pages, never under its floor, never more than its pages.

    Classes that the floor lifts above their share take it from the others.
    """
    total = sum(need.pages * c.nbytes for c, need in needs.items())
    left = float(budget.bytes_of(total))
    slots: dict[SlotClass, int] = {}
    # Smallest share of its floor first, so that what the floors take is known before the rest is divided.
    pending = sorted(needs, key=lambda c: (needs[c].pages - needs[c].floor) * c.nbytes)
    remaining = float(total)
    for slot_class in pending:
        need = needs[slot_class]
        own = need.pages * slot_class.nbytes
        portion = left * own / remaining if remaining else 0.0
        count = min(need.pages, max(min(need.floor, need.pages), int(portion // slot_class.nbytes)))
        slots[slot_class] = count
        left = max(0.0, left - count * slot_class.nbytes)
        remaining -= own
    return slots
