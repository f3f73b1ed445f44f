"""What a router says ahead of time, as probabilities.

[Note: foresight]
A layer's router may be asked early: on the input of the layer before, while that one's experts are still to come. It is
right often, not always. How often is counted, module by module: of the experts that it named, the share that was needed
(``right``), and of the others (``overlooked``); old counts fade. These shares are the probabilities that the outlook
gets for the coming forward. A wrong prediction costs io, and changes nothing that is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.observe import Observer
from megascale_omni.schedule import Phase

FADING = 0.95
"""What a count weighs one forward later."""


@dataclass
class Record:
    """How a module's predictions came out. Begins with the belief that they are right more often than not."""

    named: float = 2.0
    right: float = 1.8
    unnamed: float = 2.0
    overlooked: float = 0.4
    counts: dict[str, int] = field(default_factory=lambda: {"named": 0, "right": 0, "overlooked": 0})

    def probability(self, named: np.ndarray) -> np.ndarray:
        """Of each expert, given who was named (a mask)."""
        result: np.ndarray = np.where(named, self.right / self.named, self.overlooked / self.unnamed)
        return result

    def learn(self, named: np.ndarray, needed: np.ndarray) -> None:
        """A forward needed the experts ``needed`` (a mask)."""
        found = {"named": int(named.sum()), "right": int((named & needed).sum())}
        found["overlooked"] = int((~named & needed).sum())
        self.named = FADING * self.named + found["named"]
        self.right = FADING * self.right + found["right"]
        self.unnamed = FADING * self.unnamed + len(named) - found["named"]
        self.overlooked = FADING * self.overlooked + found["overlooked"]
        for key, count in found.items():
            self.counts[key] += count


class Foresight(Observer):
    """Takes predictions, hands them to the outlook, and watches how they come out."""

    def __init__(self, manager: ExpertManager) -> None:
        self._manager = manager
        self._open: dict[int, np.ndarray] = {}  # predictions of forwards that have not begun
        self.records: dict[int, Record] = {}
        manager.observers.append(self)

    def predict(self, module: int, named: np.ndarray) -> None:
        """The next forward of a module will need the experts ``named`` (a mask of its local experts)."""
        self._open[module] = named
        record = self.records.setdefault(module, Record())
        if self._manager.pager.can_evict:
            self._manager.outlook.foresee(module, record.probability(named))

    def visited(self, visit: Visit, pages: np.ndarray) -> None:
        """See Observer."""
        if visit.phase not in (Phase.FORWARD, Phase.EVAL):
            return
        named = self._open.pop(visit.module, None)
        if named is not None:
            needed = np.zeros(len(named), dtype=bool)
            needed[pages // self._manager.numbering.entries[visit.module].num_slices] = True
            self.records[visit.module].learn(named, needed)
