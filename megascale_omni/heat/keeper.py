"""Freezes and wakes experts: what the policy in ``states.py`` decides, done to their pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megascale_omni.config import HeatConfig
from megascale_omni.heat.agreement import AgreedHeat, Exchange, spared
from megascale_omni.heat.heatmap import HeatMap
from megascale_omni.heat.states import Heat, Snapshot, classify, scores, to_freeze, to_probe
from megascale_omni.heat.stored import by_number, combined
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.observe import StoredHeat
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

    Where ranks have agreed to decide together (:meth:`agree`), states are of all experts of a layer and follow from
    exchanged counts alone [Note: agreed heat]; an expert that is probed wakes, however long it took. Only then may
    frozen experts be left out by the router (``frozen: reroute``): an expert that is left out gets no token that could
    wake it, so that being probed is its way back, for one turn at first.
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
        self._agreed: AgreedHeat | None = None
        self._awake = 1
        self._masks: dict[int, np.ndarray | None] = {}
        self.on_refresh: Callable[[int], None] = lambda step: None
        manager.observers.append(self.map)
        manager.heat = self
        manager.schedule.on_step(self._step)

    @property
    def reroutes(self) -> bool:
        """Whether routers leave frozen experts out."""
        return self.config.frozen == "reroute"

    @property
    def agrees(self) -> bool:
        """Whether ranks decide together."""
        return self._agreed is not None

    def agree(self, exchange: Exchange, *, awake: int = 1) -> None:
        """From here on ranks decide together, by what all of them saw. All must call it, between the same two steps.

        ``awake``: experts of a layer that are never frozen at once where routers leave frozen ones out.
        """
        self._agreed, self._awake = AgreedHeat(exchange, self.config), awake

    def frozen(self, module: int) -> np.ndarray | None:
        """Mask of the experts of a layer, on all ranks, that its router leaves out; None: nobody."""
        return self._masks.get(module)

    def _step(self) -> None:
        done = self._manager.schedule.moment.step - 1  # steps that are over
        if done > 0 and done % self.config.refresh_steps == 0:
            self.refresh()

    def refresh(self) -> None:
        """Counts the part that is over, and lets the policy decide."""
        if self._agreed is not None:
            self._agreed.end_part(self.map.counts())
        self.map.end_part()
        self._turn += 1
        for module in self._manager.modules:
            self._refresh(module)
        self.on_refresh(self._manager.schedule.moment.step)

    def snapshot(self, module: PagedModule) -> Snapshot:
        """What the policy sees of a module."""
        number, experts = module.entry.module, module.entry.num_experts
        if self._agreed is not None:
            return self._agreed.snapshot(
                number,
                done=self._manager.schedule.moment.step - 1,
                flops=6.0 * module.layout.shape.num_parameters,
                slices=module.entry.num_slices,
                travels=float(self.map.travels.get(number, 0)),
            )
        pending = np.zeros(experts, dtype=bool)
        if Plane.GRADIENT in module.dtypes:
            pending = np.asarray(self._manager.present(module, Plane.GRADIENT).any(axis=1))
        states = self.states.get(number, np.full(experts, Heat.WARM, dtype=np.int8))
        return Snapshot(self.map.window(number), self.map.idle_steps(number), states, pending)

    def look(self, module: PagedModule) -> tuple[np.ndarray, np.ndarray]:
        """``[experts]`` states and ``[experts]`` scores of a module, for display. Decides nothing.

        Just after the policy has decided these are the states that it gave; later they are those that the same policy
        would give by what happened since, where this rank decides alone.
        """
        number = module.entry.module
        metrics, experts = self.map.until_now(number), module.entry.num_experts
        states = self.states.get(number, np.full(experts, Heat.WARM, dtype=np.int8))
        if self._agreed is None and self.map.has_begun(number):
            states = classify(replace(self.snapshot(module), metrics=metrics), self.config)
        return states, scores(metrics, self.config)

    def _refresh(self, module: PagedModule) -> None:
        number, snapshot = module.entry.module, self.snapshot(module)
        first = 0 if self._agreed is None else self._agreed.exchange.first
        here = range(first, first + module.entry.num_experts)
        states = classify(snapshot, self.config)
        score = scores(snapshot.metrics, self.config)
        for expert in np.nonzero((snapshot.states == Heat.FROZEN) & (states != Heat.FROZEN))[0].tolist():
            if expert in here:
                self._wake(number, expert - first)
        for expert in self._to_freeze(snapshot, states, score):
            states[expert] = Heat.FROZEN
            if expert in here:
                self._freeze(module, expert - first, float(score[expert]))
        threshold = float(np.percentile(score, self.config.cold_percentile)) if len(score) else 0.0
        before = self._threshold.get(number, threshold)
        for expert in to_probe(
            states, before=before, now=threshold, turn=self._turn, share=self.config.probe_share
        ).tolist():
            answered = expert not in here or self._probe(module, expert - first)
            if answered or self._agreed is not None:
                states[expert] = Heat.WARM
                if expert in here:
                    self._wake(number, expert - first)
        self._threshold[number] = threshold
        self.states[number] = states[first : first + module.entry.num_experts]
        if self._agreed is not None:
            self._agreed.states[number] = states
            out = states == Heat.FROZEN
            self._masks[number] = out if self.reroutes and out.any() else None
        self._watch(number, score, first)

    def _to_freeze(self, snapshot: Snapshot, states: np.ndarray, score: np.ndarray) -> list[int]:
        """Experts to freeze now. Who is left out by routers must not depend on whether pages can leave."""
        if not (self._manager.pager.can_evict or self.reroutes):
            return []
        chosen = to_freeze(snapshot, states, self.config)
        if self.reroutes:
            if self._agreed is None:  # nobody said how many experts a token needs
                return []
            chosen = spared(states, chosen, score, awake=self._awake)
        found: list[int] = chosen.tolist()
        return found

    def _freeze(self, module: PagedModule, expert: int, score: float) -> None:
        self._manager.send_away(self._pages(module, expert))
        self.frozen_at[module.entry.module, expert] = (self._manager.schedule.moment.step, score)
        self.counts["frozen"] += 1

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

    def _watch(self, module: int, score: np.ndarray, first: int) -> None:
        """Raises the alarm, once, for experts that have been below the alarm percentile for too long.

        ``score`` is of all experts that are compared; this rank's begin at ``first``.
        """
        if not len(score):
            return
        states = self.states[module]
        low = score[first : first + len(states)] <= np.percentile(score, self.config.alarm_percentile)
        quiet = low & (states <= Heat.COLD)
        now = self._clock()
        for expert in range(len(states)):
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

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def stored(self, module: int, numbers: Sequence[int]) -> dict[str, Any]:
        """What a checkpoint has of a module, see stored's [Note: stored heat]. ``numbers``: of its local experts."""
        here, now = range(len(numbers)), self._clock()
        states = self.states.get(module, np.full(len(numbers), Heat.WARM, dtype=np.int8))
        return {
            "experts": list(numbers),
            "counts": self.map.stored(module).as_json(),
            "refresh_steps": self.config.refresh_steps,
            "turn": self._turn,
            "threshold": self._threshold.get(module),
            "states": states.tolist(),
            "frozen": [self.frozen_at.get((module, expert)) for expert in here],
            "cold_seconds": [
                int(now - self._cold_since[module, expert]) if (module, expert) in self._cold_since else None
                for expert in here
            ],
            "alarmed": [True if (module, expert) in self.long_cold else None for expert in here],
        }

    def restore(self, modules: Mapping[int, StoredHeat]) -> None:
        """Goes on from what was stored: counts, states, and whom routers leave out. Frozen experts' pages leave."""
        known = {number: self._comparable(of) for number, of in modules.items() if of.found}
        for number, of in known.items():
            self._restore(number, of)
        agreed = self._agreed
        everybody = [known[m.entry.module] for m in self._manager.modules if m.entry.module in known]
        if agreed is None or len(everybody) < len(self._manager.modules):
            return
        if any(of.num_experts != agreed.exchange.num_experts for of in everybody):
            return
        slices = [module.entry.num_slices for module in self._manager.modules]
        counts = [combined(of.found, range(of.num_experts), slices=n) for of, n in zip(everybody, slices, strict=True)]
        agreed.restore(counts, [_states(of.found, range(of.num_experts)) for of in everybody])
        for number, states in enumerate(agreed.states):
            out = states == Heat.FROZEN
            self._masks[number] = out if self.reroutes and out.any() else None

    def _comparable(self, of: StoredHeat) -> StoredHeat:
        """Without the parts of the window where a part has another number of steps now."""
        found = [
            item
            if item["refresh_steps"] == self.config.refresh_steps
            else {**item, "counts": {**item["counts"], "parts": []}}
            for item in of.found
        ]
        return replace(of, found=found)

    def _restore(self, number: int, of: StoredHeat) -> None:
        module = self._manager.modules[number]
        counts = combined(of.found, of.numbers, slices=module.entry.num_slices)
        self.map.restore(number, counts.share(of.rank, of.size))
        self._turn = max(item["turn"] for item in of.found)
        thresholds = [item["threshold"] for item in of.found if item["threshold"] is not None]
        if thresholds:
            self._threshold[number] = thresholds[0]
        states = _states(of.found, of.numbers)
        if not (self._manager.pager.can_evict or self.reroutes):
            states[states == Heat.FROZEN] = Heat.COLD
        self.states[number] = states
        frozen, cold, alarmed = (by_number(of.found, key) for key in ("frozen", "cold_seconds", "alarmed"))
        now = self._clock()
        for expert, name in enumerate(of.numbers):
            if states[expert] == Heat.FROZEN:
                self._manager.send_away(self._pages(module, expert))
                step, score = frozen.get(name, (self._manager.schedule.moment.step, 0.0))
                self.frozen_at[number, expert] = step, score
            if name in cold:
                self._cold_since[number, expert] = now - cold[name]
            if name in alarmed:
                self.long_cold.add((number, expert))

    def close(self) -> None:
        """Observes no longer."""
        if self.map in self._manager.observers:
            self._manager.observers.remove(self.map)
        if self._manager.heat is self:
            self._manager.heat = None


def _states(found: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> np.ndarray:
    """Stored states of experts (global numbers); those that nobody stored are warm."""
    known = by_number(found, "states")
    return np.array([known.get(number, Heat.WARM) for number in numbers], dtype=np.int8)
