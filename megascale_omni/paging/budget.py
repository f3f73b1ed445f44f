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

    @property
    def is_nothing(self) -> bool:
        """Whether no page fits in it, however many there are."""
        return self.nbytes == 0 or self.fraction == 0

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

    What the floors of some classes take beyond their share, the others go without: where the budget holds all floors
    (see :func:`smallest_budget`), all slots together are within it.
    """
    left = budget.bytes_of(sum(need.pages * c.nbytes for c, need in needs.items()))
    slots: dict[SlotClass, int] = {}
    pending = {c: need for c, need in needs.items() if need.pages}
    while pending:
        wanted = sum(need.pages * c.nbytes for c, need in pending.items())
        portions = {c: min(need.pages, left * need.pages // wanted) for c, need in pending.items()}
        lifted = {c: min(n.floor, n.pages) for c, n in pending.items() if portions[c] < min(n.floor, n.pages)}
        settled = lifted or portions
        slots.update(settled)
        left = max(0, left - sum(count * c.nbytes for c, count in settled.items()))
        pending = {c: need for c, need in pending.items() if c not in settled}
    return {c: slots.get(c, 0) for c in needs}
