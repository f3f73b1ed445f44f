"""The heat map: what every expert did in every window of steps."""

from __future__ import annotations

import numpy as np

from megascale_omni.config import HeatConfig
from megascale_omni.heat.stored import FORWARDS, TOKENS, USES, Counts
from megascale_omni.heat.work_time import WorkTime
from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.observe import Observer
from megascale_omni.paging.planes import ModuleEntry
from megascale_omni.schedule import Phase

COMPUTE, MEMORY, COMMUNICATION = 0, 1, 2
HEATING = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.STEP})
"""Recompute and evaluation add no heat: they repeat, or do not train."""

MOST_WAITING = 256
"""Forwards of a module that wait to be counted."""


class HeatMap(Observer):
    """An observer that counts ``[expert, window, metric]`` of every module, see states' [Note: heat].

    A window is kept in parts of ``refresh_steps``, so that the newest window slides. ``travels`` are the bytes that a
    token of a module travels in a step (0 where experts are on the rank that has the tokens).
    """

    def __init__(self, manager: ExpertManager, config: HeatConfig) -> None:
        self._manager = manager
        self._parts = max(1, config.window_steps // config.refresh_steps)
        self.travels: dict[int, int] = {}
        self._routed: dict[int, list[tuple[int, np.ndarray]]] = {}  # forwards that are not counted yet: (step, counts)
        self.work_time = WorkTime.on(
            manager.arena.device, waited=lambda: manager.pager.counts["stall_microseconds"] / 1e6
        )
        self._heats = False  # the sweep at hand
        self._tokens: dict[int, np.ndarray] = {}  # of the part at hand, [experts]
        self._forwards: dict[int, np.ndarray] = {}  # of the part at hand with tokens of each expert, [experts]
        self._uses = np.zeros(0, dtype=np.int64)  # of page indices
        self._past: dict[int, list[np.ndarray]] = {}  # parts, [experts, 3]: tokens, forwards, uses
        self._last: dict[int, np.ndarray] = {}

    # -- what is seen --------------------------------------------------------------------------------------------------

    def visited(self, visit: Visit, pages: np.ndarray) -> None:
        """See Observer. A visit holds each of its pages once: they are counted as it begins."""
        self._heats = visit.phase in HEATING
        if not self._heats:
            return
        self._see_all_pages()
        self._uses[self._manager.numbering.entries[visit.module].first_index + pages] += len(visit.planes)

    def _see_all_pages(self) -> None:
        more = self._manager.numbering.num_indices - len(self._uses)
        if more > 0:
            self._uses = np.concatenate([self._uses, np.zeros(more, dtype=np.int64)])

    def working(self, module: int) -> None:
        """See Observer."""
        if self._heats:
            self.work_time.begin()

    def worked(self, module: int) -> None:
        """See Observer."""
        self.work_time.end(module)

    def routed(self, module: int, counts: np.ndarray) -> None:
        """See Observer. Forwards are counted together, when somebody asks or there are many."""
        step = self._manager.schedule.moment.step
        waiting = self._routed.get(module)
        if waiting is None:
            waiting = self._routed[module] = []
            self._last.setdefault(module, np.full(len(counts), step))
        waiting.append((step, counts.copy()))
        if len(waiting) >= MOST_WAITING:
            self._count(module)

    def _count(self, module: int) -> None:
        """Counts the forwards of a module that wait."""
        waiting = self._routed.get(module)
        if not waiting:
            return
        steps, counts = np.array([step for step, _ in waiting]), np.stack([tokens for _, tokens in waiting])
        waiting.clear()
        active = counts > 0
        for sums, more in ((self._tokens, counts), (self._forwards, active)):
            total = more.sum(axis=0)
            sums[module] = sums[module] + total if module in sums else total
        last = np.where(active, steps[:, None], 0).max(axis=0)
        self._last[module] = np.maximum(self._last[module], last)

    def _count_all(self) -> None:
        for module in self._routed:
            self._count(module)

    @property
    def last_token_step(self) -> dict[int, np.ndarray]:
        """Of each module: the step of each expert's last token, ``[experts]``."""
        self._count_all()
        return self._last

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def counts(self) -> np.ndarray:
        """``[modules, experts, 3]`` of the part at hand: tokens, forwards with tokens, step of the last token.

        For modules of equally many experts.
        """
        self._count_all()
        found = np.zeros((len(self._manager.modules), self._manager.modules[0].entry.num_experts, 3), dtype=np.int64)
        for row, module in enumerate(self._manager.modules):
            number = module.entry.module
            if number in self._tokens:
                found[row, :, 0], found[row, :, 1] = self._tokens[number], self._forwards[number]
            if number in self._last:
                found[row, :, 2] = self._last[number]
        return found

    def end_part(self) -> None:
        """The newest part is complete; the oldest is forgotten."""
        self._count_all()
        for module in self._manager.modules:
            past = self._past.setdefault(module.entry.module, [])
            past.append(self._open(module.entry))
            del past[: -self._parts]
            self.work_time.split(module.entry.module, past[-1][:, TOKENS])
        self._tokens.clear()
        self._forwards.clear()
        self._uses[:] = 0

    def window(self, module: int) -> np.ndarray:
        """``[experts, 3]`` of the last window of complete parts."""
        past = self._past.get(module)
        if not past:
            return np.zeros((self._manager.numbering.entries[module].num_experts, 3))
        return self._metrics(module, np.sum(past, axis=0))

    def has_begun(self, module: int) -> bool:
        """Whether experts of a module got tokens in the part at hand."""
        self._count(module)
        return module in self._tokens

    def until_now(self, module: int) -> np.ndarray:
        """``[experts, 3]`` of the last window with the part at hand."""
        parts = [*self._past.get(module, []), self._open(self._manager.numbering.entries[module])]
        return self._metrics(module, np.sum(parts, axis=0))

    def newest(self, module: int) -> np.ndarray:
        """``[experts, 3]`` of the newest part."""
        return self._metrics(module, self._past[module][-1])

    def _open(self, entry: ModuleEntry) -> np.ndarray:
        """``[experts, 3]`` of the part at hand: tokens, forwards, uses."""
        self._count(entry.module)
        part = np.zeros((entry.num_experts, 3), dtype=np.int64)
        if entry.module in self._tokens:
            part[:, TOKENS], part[:, FORWARDS] = self._tokens[entry.module], self._forwards[entry.module]
        uses = self._uses[entry.first_index : entry.first_index + entry.num_pages]
        if len(uses) == entry.num_pages:
            part[:, USES] = uses.reshape(entry.num_experts, entry.num_slices).sum(axis=1)
        return part

    def _metrics(self, module: int, counts: np.ndarray) -> np.ndarray:
        """``[experts, metric]`` of tokens, forwards and uses."""
        found, tokens = np.zeros(counts.shape), counts[:, TOKENS].astype(float)
        # A token's products: forward, gradients of inputs and of weights.
        found[:, COMPUTE] = tokens * (6.0 * self._manager.modules[module].layout.shape.num_parameters)
        found[:, MEMORY] = counts[:, USES]
        found[:, COMMUNICATION] = tokens * float(self.travels.get(module, 0))
        return found

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def stored(self, module: int) -> Counts:
        """What a checkpoint has of a module's counts, see stored's [Note: stored heat]."""
        self._count(module)
        entry = self._manager.numbering.entries[module]
        past = self._past.get(module, [])
        parts = np.stack(past) if past else np.zeros((0, entry.num_experts, 3), dtype=np.int64)
        last = self._last.get(module, np.zeros(entry.num_experts, dtype=np.int64))
        return Counts(parts, self._open(entry), last.copy(), entry.num_slices)

    def restore(self, module: int, counts: Counts) -> None:
        """Goes on from stored counts."""
        self._routed.pop(module, None)
        entry = self._manager.numbering.entries[module]
        self._past[module] = list(counts.parts[-self._parts :])
        self._tokens[module] = counts.open[:, TOKENS].copy()
        self._forwards[module] = counts.open[:, FORWARDS].copy()
        self._last[module] = counts.last.copy()
        self._see_all_pages()
        uses = self._uses[entry.first_index : entry.first_index + entry.num_pages]
        uses[:] = 0
        uses[:: entry.num_slices] = counts.open[:, USES]  # of which of its pages is not asked

    def idle_steps(self, module: int) -> np.ndarray:
        """Whole steps since each expert's last token (since its module was first seen, where it never had one)."""
        self._count(module)
        done = self._manager.schedule.moment.step - 1
        seen = self._last.get(module)
        if seen is None:
            return np.zeros(self._manager.numbering.entries[module].num_experts, dtype=np.int64)
        return np.maximum(0, done - seen)
