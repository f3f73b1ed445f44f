"""What to do when device memory runs out: the arena becomes smaller than its budget, before something ends the process.

[Note: emergency]
A budget is fixed when a run starts; what else needs memory (activations, another process) is not. So free memory is
looked at as sweeps begin, at most every ``LOOK_SECONDS``; less often while much is free, and ever less often where
nothing was left to give: another process may keep a device full for hours. Where less than a share of it is free, pages
give memory back until twice that share is (of memory that local ranks share, each rank its part): first memory that no
page lies in, then clean pages without leases, dropped without a write, those needed last first; then dirty ones, which
are written back. Leases are never touched, and every slot class keeps the slots that a run with that budget would need
to start (two groups of pages that are worked on together), so that nothing waits for ever. Between two steps pages get
back what has become free beyond twice the share, up to their budget. Residency decides about time only: no bit changes,
and no other rank need know.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from megascale_omni.paging.budget import share
from megascale_omni.paging.flights import FlightKind
from megascale_omni.paging.layout import MIB, SlotClass
from megascale_omni.paging.memory import FreeMemory, MemoryProbe
from megascale_omni.paging.needs import class_needs
from megascale_omni.paging.residency import Candidates

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Asking the system takes a tenth of a millisecond."""

CALM, CALM_PAUSE = 4.0, 4.0
"""Where so many times the share is free, so many times as long goes by until the next look."""

LONGEST_PAUSE_SECONDS = 16.0
"""Between two looks where there is nothing to give."""

RELIEF = 2.0
"""How much of the share is free afterwards, lest the next look finds the same again."""


@dataclass(frozen=True)
class ClassState:
    """Slots of a class: those there is memory for, those taken, the floor; and pages that may leave."""

    capacity: int
    used: int
    floor: int
    clean: int
    dirty: int


def missing_bytes(memory: FreeMemory, least: float) -> int:
    """Bytes that this process should give back where less than the share ``least`` of memory is free; 0 elsewhere."""
    if memory.share >= least:
        return 0
    return math.ceil((math.ceil(RELIEF * least * memory.total_bytes) - memory.free_bytes) / memory.sharers)


def limits_for(states: Mapping[SlotClass, ClassState], missing: int) -> dict[SlotClass, int]:
    """Slots that each class keeps so that ``missing`` bytes return, or as many as can, see [Note: emergency].

    Empty slots go first, then those of clean pages, then those of dirty ones; each kind in proportion to what the
    classes have of it.
    """
    kept = {c: state.capacity for c, state in states.items()}
    kinds: tuple[Literal["empty", "clean", "dirty"], ...] = ("empty", "clean", "dirty")
    for kind in kinds:
        have = {c: max(0, kept[c] - max(state.floor, _least(state, kind))) for c, state in states.items()}
        nbytes = sum(count * c.nbytes for c, count in have.items())
        missing = max(0, missing)  # a whole slot may have been more than was left
        part = 1.0 if nbytes <= missing else missing / nbytes
        for c, count in have.items():
            given = min(count, math.ceil(count * part))
            kept[c] -= given
            missing -= given * c.nbytes
    return {c: max(kept[c], state.floor) for c, state in states.items()}


def _least(state: ClassState, kind: Literal["empty", "clean", "dirty"]) -> int:
    """Slots that are left when all of a kind, and of those before it, have gone."""
    if kind == "empty":
        return state.used
    return state.used - state.clean - (state.dirty if kind == "dirty" else 0)


def limits_raised(limits: Mapping[SlotClass, int], budget: Mapping[SlotClass, int], spare: int) -> dict[SlotClass, int]:
    """Slots of each class where ``spare`` more bytes may be taken: never more than these, in proportion to what each
    class has less than its ``budget``.
    """
    lacking = {c: max(0, budget[c] - slots) for c, slots in limits.items()}
    nbytes = max(1, sum(slots * c.nbytes for c, slots in lacking.items()))
    return {c: limits[c] + slots * min(spare, nbytes) // nbytes for c, slots in lacking.items()}


def order_of_giving_up(candidates: Candidates) -> np.ndarray:
    """Page ids, first to go first: clean before dirty; of these the one needed last, then the one used longest ago."""
    order = np.lexsort((candidates.last_use, -candidates.next_use, candidates.dirty))
    found: np.ndarray = candidates.page_ids[order]
    return found


class Emergency:
    """Watches over one manager's device arena. ``least``: share of memory that is to be free; 0 never looks."""

    def __init__(self, manager: ExpertManager, *, least: float, probe: MemoryProbe, clock: Callable[[], float]) -> None:
        self._manager, self._least, self._probe, self._clock = manager, least, probe, clock
        self._looked, self._pause = -math.inf, 0.0
        self._told = False
        self.lowered = False
        """Whether an arena is smaller than its budget."""

    def look(self) -> None:
        """Asks how much memory is free, if it is time, and gives back what is missing. Between two groups of pages."""
        if not self._least:
            return
        now = self._clock()
        if now - self._looked < self._pause:
            return
        self._looked, memory = now, self._probe()
        missing = missing_bytes(memory, self._least)
        if missing > 0:
            in_vain = not self._give_back(missing)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS) if in_vain and self._pause else LOOK_SECONDS
        else:
            self._told = False
            self._pause = LOOK_SECONDS * (CALM_PAUSE if memory.share >= CALM * self._least else 1.0)

    def states(self) -> dict[SlotClass, ClassState]:
        """The device arena's classes as they are."""
        manager = self._manager
        arena, floors = manager.arena, class_needs(manager.modules)
        found = {}
        for slot_class, need in floors.items():
            leaving = manager.pager.victims.snapshot(slot_class)
            dirty = int(leaving.dirty.sum())
            found[slot_class] = ClassState(
                capacity=arena.capacity(slot_class),
                used=arena.used(slot_class),
                floor=min(need.floor, need.pages),
                clean=len(leaving.dirty) - dirty,
                dirty=dirty,
            )
        return found

    def _give_back(self, missing: int) -> bool:
        """Whether anything was given."""
        manager = self._manager
        pager, arena = manager.pager, manager.arena
        pager.poll()
        states, reserved = self.states(), arena.bytes_reserved
        limits = {
            c: slots if slots >= states[c].capacity else max(states[c].floor, arena.in_whole_segments(c, slots))
            for c, slots in limits_for(states, missing).items()
        }
        limits = {c: slots for c, slots in limits.items() if slots < states[c].capacity}  # others have nothing to give
        before, host_gave = dict(pager.counts), False
        for slot_class, slots in limits.items():
            limit = arena.limit(slot_class)
            if limit is not None and slots < limit:
                self.lowered = True
                arena.set_limit(slot_class, slots)
        # Of all classes first, so that what is written by one is on its way while another one's pages are dropped.
        leaving = {c: self._send_away(c) for c in limits}
        for slot_class, went in leaving.items():
            if went:
                self._wait_for(slot_class)
                pager.restart_shadow(slot_class)
            pager.compact(slot_class)
        if arena.device.type == "cuda":
            if limits:
                torch.cuda.empty_cache()
        elif missing > reserved - arena.bytes_reserved:
            host_gave = manager.shares.limit_host(less_by=missing - reserved + arena.bytes_reserved)
            self.lowered |= host_gave
        written, gone = (pager.counts[name] - before.get(name, 0) for name in ("bytes_written", "pages_evicted"))
        if gone or reserved > arena.bytes_reserved:
            pager.counts["emergencies"] += 1
            pager.counts["emergency_pages"] += gone
        self._tell(missing, given=reserved - arena.bytes_reserved, gone=gone, written=written)
        return bool(gone or reserved > arena.bytes_reserved or host_gave)

    def _send_away(self, slot_class: SlotClass) -> int:
        """Lets pages of a class leave until it is within its limit; how many."""
        pager, arena = self._manager.pager, self._manager.arena
        excess = arena.used(slot_class) - (arena.limit(slot_class) or 0)
        if excess <= 0:
            return 0
        chosen = order_of_giving_up(pager.victims.snapshot(slot_class))[:excess].tolist()
        pager.departures.give_up(chosen, to_disk=arena.device.type == "cpu")  # host memory would be the same memory
        return len(chosen)

    def _wait_for(self, slot_class: SlotClass) -> None:
        """Waits until the pages of a class that are leaving have left."""
        pager = self._manager.pager
        while jobs := pager.flights.jobs(slot_class, FlightKind.LEAVING, but=()):
            assert pager.tiers.mover is not None
            pager.tiers.mover.wait_any(jobs, what="giving memory back")
            pager.poll()

    def relax(self) -> None:
        """Between two steps: gives the arena back what there is room for, up to its budget."""
        if not self.lowered:
            return
        manager = self._manager
        arena, needs = manager.arena, class_needs(manager.modules)
        memory = self._probe()
        limits = {c: arena.limit(c) or 0 for c in needs}
        allowed = sum(slots * c.nbytes for c, slots in limits.items())
        promised = max(0, allowed - arena.bytes_reserved)  # and not taken yet
        spare = (memory.free_bytes - math.ceil(RELIEF * self._least * memory.total_bytes)) // memory.sharers - promised
        if spare <= 0:
            return
        budget = share(manager.options.device_budget, needs)
        raised = limits_raised(limits, budget, spare)
        for slot_class, slots in raised.items():
            if slots > limits[slot_class]:
                arena.set_limit(slot_class, slots)
                manager.pager.restart_shadow(slot_class)
        if all(raised[c] >= slots for c, slots in budget.items()):
            self.lowered = False
            manager.shares.limit_host()
            nbytes = sum(slots * c.nbytes for c, slots in budget.items())
            logger.info("device memory is free again: pages have their budget of %d MiB back", nbytes // MIB)

    def _tell(self, missing: int, *, given: int, gone: int, written: int) -> None:
        """Once, until memory was free again in between."""
        if self._told:
            return
        self._told = True
        arena = self._manager.arena
        allowed = sum((arena.limit(c) or 0) * c.nbytes for c in arena.slot_classes())
        logger.warning(
            "less than %g %% of device memory is free: pages give %.1f MiB of %.1f MiB back (%d left, %.1f MiB "
            "written); the arena may have %.1f MiB until there is more%s",
            100 * self._least,
            given / MIB,
            missing / MIB,
            gone,
            written / MIB,
            allowed / MIB,
            "" if given >= missing else ". All other pages are in use: use a smaller --megascale-device-budget",
        )
