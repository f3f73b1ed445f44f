"""Freezes and wakes experts: what the policy in ``states.py`` decides, done to their pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from megascale_omni.config import HeatConfig
from megascale_omni.heat.heatmap import HeatMap
from megascale_omni.heat.states import Heat, Snapshot, classify, scores, to_freeze, to_probe
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import Plane

logger = logging.getLogger(__name__)


class HeatKeeper:
    """Keeps every module's states; looks at the heat map every ``refresh_steps`` steps, between two of them.

    [Note: freeze and wake]
    Where pages can leave at all, freezing sends an expert's pages away and notes when, and its last score; the router
    does not know of it. A token that reaches the expert wakes it: its pages are fetched as any others, and it is warm
    from then on. Nothing that is computed depends on the state. When the module's cold threshold rises, traffic is
    coming back: some frozen experts are probed with a product of their own, and stay if it was answered within
    ``probe_seconds``. Time decides only about residency.
    """

    def __init__(
        self, manager: ExpertManager, config: HeatConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.map = HeatMap(manager, config)
        self.states: dict[int, np.ndarray] = {}
        self.frozen_at: dict[tuple[int, int], tuple[int, float]] = {}  # (module, expert): step, last score
        self.long_cold: set[tuple[int, int]] = set()
        self.counts = {"frozen": 0, "woken": 0, "probed": 0}
        self._manager = manager
        self._clock = clock
        self._cold_since: dict[tuple[int, int], float] = {}
        self._threshold: dict[int, float] = {}
        self._turn = 0
        self.on_refresh: Callable[[int], None] = lambda step: None
        manager.observers.append(self.map)
        manager.schedule.on_step(self._step)

    def _step(self) -> None:
        done = self._manager.schedule.moment.step - 1  # steps that are over
        if done > 0 and done % self.config.refresh_steps == 0:
            self.refresh()

    def refresh(self) -> None:
        """Counts the part that is over, and lets the policy decide."""
        self.map.end_part()
        self._turn += 1
        for module in self._manager.modules:
            self._refresh(module)
        self.on_refresh(self._manager.schedule.moment.step)

    def snapshot(self, module: PagedModule) -> Snapshot:
        """What the policy sees of a module."""
        number, experts = module.entry.module, module.entry.num_experts
        pending = np.zeros(experts, dtype=bool)
        if Plane.GRADIENT in module.dtypes:
            pending = np.asarray(self._manager.present(module, Plane.GRADIENT).any(axis=1))
        states = self.states.get(number, np.full(experts, Heat.WARM, dtype=np.int8))
        return Snapshot(self.map.window(number), self.map.idle_steps(number), states, pending)

    def _refresh(self, module: PagedModule) -> None:
        number, snapshot = module.entry.module, self.snapshot(module)
        states = classify(snapshot, self.config)
        score = scores(snapshot.metrics, self.config)
        for expert in np.nonzero((snapshot.states == Heat.FROZEN) & (states != Heat.FROZEN))[0].tolist():
            self._wake(number, expert)
        may_leave = self._manager.pager.can_evict
        for expert in to_freeze(snapshot, states, self.config).tolist() if may_leave else ():
            self._manager.send_away(self._pages(module, expert))
            states[expert] = Heat.FROZEN
            self.frozen_at[number, expert] = (self._manager.schedule.moment.step, float(score[expert]))
            self.counts["frozen"] += 1
        threshold = float(np.percentile(score, self.config.cold_percentile)) if len(score) else 0.0
        before = self._threshold.get(number, threshold)
        for expert in to_probe(
            states, before=before, now=threshold, turn=self._turn, share=self.config.probe_share
        ).tolist():
            if self._probe(module, expert):
                states[expert] = Heat.WARM
                self._wake(number, expert)
        self._threshold[number] = threshold
        self.states[number] = states
        self._watch(number, score)

    def _wake(self, module: int, expert: int) -> None:
        self.frozen_at.pop((module, expert), None)
        self.counts["woken"] += 1

    def _pages(self, module: PagedModule, expert: int) -> np.ndarray:
        """Ids of an expert's pages in all planes of its module."""
        ids = self._manager.ids(module, Plane.WEIGHT, [expert])
        planes = np.asarray([int(plane) for plane in module.dtypes])
        pages: np.ndarray = (ids[:, None] + planes).reshape(-1)
        return pages

    def _probe(self, module: PagedModule, expert: int) -> bool:
        """A dummy forward; whether it was answered in time. Nothing of it is kept."""
        self.counts["probed"] += 1
        start = self._clock()
        with torch.no_grad(), self._manager.lease(module, Plane.WEIGHT, [expert]) as lease:
            for slice_ in range(module.entry.num_slices):
                views = lease.views(expert, slice_)
                token = views.fc1_Rh.new_zeros(1, module.layout.shape.hidden)
                up = token @ views.fc1_Rh.t()
                _ = up[:, : views.down_rh.shape[0]] @ views.down_rh
        return self._clock() - start <= self.config.probe_seconds

    def _watch(self, module: int, score: np.ndarray) -> None:
        """Raises the alarm, once, for experts that have been below the alarm percentile for too long."""
        if not len(score):
            return
        low = score <= np.percentile(score, self.config.alarm_percentile)
        quiet = low & (self.states[module] <= Heat.COLD)
        now = self._clock()
        for expert in range(len(score)):
            name = (module, expert)
            if not quiet[expert]:
                self._cold_since.pop(name, None)
                self.long_cold.discard(name)
            elif now - self._cold_since.setdefault(name, now) >= 3600 * self.config.alarm_hours:
                if name not in self.long_cold:
                    self.long_cold.add(name)
                    logger.warning(
                        "%s, local expert %d has been cold for %g hours: its router hardly ever chooses it",
                        self._manager.numbering.path(module),
                        expert,
                        self.config.alarm_hours,
                    )

    def close(self) -> None:
        """Observes no longer."""
        if self.map in self._manager.observers:
            self._manager.observers.remove(self.map)
