"""Replays a trace under a residency policy and a budget: what would have been moved.

[Note: what a replay counts]
A page-in is a page that is brought to the device arena from anywhere; it is *demanded* when a lease waits for it and
*prefetched* when it comes before. Moves take no time here, so that policies are compared and not disks. Slot classes
share the budget as in a run, and none borrows from another. ``min`` is Belady's: it knows the whole trace and evicts
the page whose next use is farthest away. It may even evict pages that a lease still holds, so that nobody can have
fewer page-ins. ``ours`` runs the functions that a run runs (``outlook.py``, ``residency.py``). In a run dirty pages
take time to leave, and several begin to at once; a replay in which they leave ``together`` counts them as a run does:
a few page-ins more, and fewer writes, since a clean page is sooner reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.minimum import Moved, replay_minimum
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.policies import Lru, Ours, Policy
from megascale_omni.paging.recorder import PHASES
from megascale_omni.paging.residency import displaced_before, pages_ahead, probable_experts, victims_at_once
from megascale_omni.paging.shadow import Shadows
from megascale_omni.paging.trace import Event, Op, Trace
from megascale_omni.paging.traced_slots import page_classes, slots_of
from megascale_omni.schedule import Phase

PolicyName = Literal["lru", "ours", "min"]


class _Machine:
    """An arena that a policy looks after."""

    def __init__(
        self,
        trace: Trace,
        budget: Budget,
        policy: Policy,
        moved: Moved,
        dirty: np.ndarray,
        *,
        since: int,
        together: bool,
    ) -> None:
        self.numbering = trace.model.numbering()
        self.policy, self.moved, self.dirty, self.since, self.together = policy, moved, dirty, since, together
        self.classes = page_classes(trace.model)
        self.slots = slots_of(trace.model, budget)
        pages = self.numbering.num_pages
        self.kinds = list(self.slots)
        self.kind_of = np.full(pages, -1, dtype=np.int16)
        for page_id, slot_class in self.classes.items():
            self.kind_of[page_id] = self.kinds.index(slot_class)
        self.resident = np.zeros(pages, dtype=bool)
        self.present = np.zeros(pages, dtype=bool)
        self.pins = np.zeros(pages, dtype=np.int32)
        self.used = dict.fromkeys(self.kinds, 0)
        self.visit: Visit | None = None
        self.visited = np.zeros(0, dtype=np.int64)
        self.smallest = min(self.slots.values(), default=0)
        self.shadows = Shadows(self.classes.__getitem__, lambda slot_class: lambda: self.slots[slot_class])

    def run(self, events: Iterable[Event]) -> None:
        """Replays events."""
        for event in events:
            ids = event.numbers
            match event.op:
                case Op.STEP:
                    self.policy.step()
                    if int(ids[0]) == self.since:
                        self.moved.restart()
                case Op.VISIT:
                    self.visit, self.visited = visit_of(event)
                    self.policy.begin(self.visit, self.visited)
                case Op.CREATE:
                    for page_id in ids.tolist():
                        self.shadows.of_page(page_id).create(page_id, pinned=self._pinned)
                        self._take(page_id, keep=frozenset(ids.tolist()))
                        self.present[page_id] = self.resident[page_id] = self.dirty[page_id] = True
                    self.policy.use(ids.tolist())
                case Op.HOLD:
                    self._hold(ids)
                case Op.REACH:
                    self.policy.reach(int(ids[0]))
                    if self.policy.prefetches and self.visit is not None:
                        self._ahead(int(ids[0]))
                case Op.RELEASE:
                    np.subtract.at(self.pins, ids, 1)
                case Op.DROP:
                    for page_id in ids.tolist():
                        self._leave(page_id)
                        self.shadows.of_page(page_id).drop(page_id)
                    self.present[ids] = self.dirty[ids] = False
                case Op.WRITE:
                    self.dirty[ids] = True

    def _hold(self, ids: np.ndarray) -> None:
        keep = frozenset(ids.tolist())
        self.policy.use(ids.tolist())
        self.shadows.use(ids, here=lambda p: bool(self.resident[p]), pinned=self._pinned)
        for page_id in ids.tolist():
            self.moved.uses += 1
            self.moved.used_bytes += self.classes[page_id].nbytes
            if not self.resident[page_id]:
                self.shadows.of_page(page_id).loaded(page_id)
                self._take(page_id, keep=keep)
                self._bring(page_id)
                self.moved.demanded_bytes += self.classes[page_id].nbytes
        np.add.at(self.pins, ids, 1)

    def _bring(self, page_id: int) -> None:
        self.present[page_id] = self.resident[page_id] = True
        self.dirty[page_id] = False
        self.moved.came(self.classes[page_id].nbytes, self._phase)

    @property
    def _phase(self) -> Phase:
        return Phase.IDLE if self.visit is None else self.visit.phase

    def _pinned(self, page_id: int) -> bool:
        return bool(self.pins[page_id])

    def _take(self, page_id: int, *, keep: frozenset[int], before: float = -np.inf) -> bool:
        """Makes sure of a slot; False where every page is needed sooner than ``before``."""
        slot_class = self.classes[page_id]
        if self.used[slot_class] >= self.slots[slot_class]:
            mask = self.resident & (self.pins == 0) & (self.kind_of == self.kind_of[page_id])
            pages = np.nonzero(mask)[0]
            pages = pages[~np.isin(pages, np.fromiter(keep, dtype=np.int64))]
            count = victims_at_once(self.slots[slot_class]) if self.together else 1
            leaving = self.policy.victims(pages, count=count, before=before, shadow=self.shadows.of(slot_class))
            if not leaving:
                if before == -np.inf:
                    raise ValueError(
                        f"the budget of {self.moved.budget_bytes} bytes is too small: all {self.slots[slot_class]} "
                        f"slots of {slot_class.nbytes} bytes are held at once; give more"
                    )
                return False
            for victim in leaving:
                was_clean = not self.dirty[victim]
                if not was_clean:
                    self.moved.went(slot_class.nbytes, self._phase)
                    self.dirty[victim] = False
                self._leave(victim)
                if was_clean:
                    break
        self.used[slot_class] += 1
        return True

    def _leave(self, page_id: int) -> None:
        if self.resident[page_id]:
            self.used[self.classes[page_id]] -= 1
            self.resident[page_id] = False
            self.shadows.of_page(page_id).leave((page_id,))

    def _ahead(self, index: int) -> None:
        """What a run asks for early, see ExpertManager."""
        assert isinstance(self.policy, Ours)
        assert self.visit is not None
        entry = self.numbering.entries[self.visit.module]
        outlook = self.policy.outlook
        room = pages_ahead(self.smallest)
        planes = np.asarray([int(p) for p in self.visit.planes])
        rest = self.visited[self.visited > index]
        wanted = ((entry.first_index + rest[:, None]) * NUM_PLANES + planes).reshape(-1)
        wanted = wanted[self.present[wanted]][:room]
        if len(wanted) < room:
            wanted = np.concatenate([wanted, self._next_pages(outlook, room - len(wanted))])
        for number, page_id in enumerate(wanted.tolist()):
            if self.resident[page_id]:
                continue
            needed = float(outlook.next_use(np.asarray([page_id]))[0])
            held = np.nonzero((self.pins > 0) & (self.kind_of == self.kind_of[page_id]))[0]
            before = displaced_before(number, needed, float(outlook.next_use(held).max(initial=-np.inf)))
            shadow = self.shadows.of_page(page_id)
            if not shadow.may_load(page_id):
                return
            shadow.loaded(page_id)
            if not self._take(page_id, keep=frozenset((page_id,)), before=before):
                shadow.not_loaded(page_id)
                return
            self._bring(page_id)
            self.moved.prefetched_bytes += self.classes[page_id].nbytes

    def _next_pages(self, outlook: Outlook, count: int) -> np.ndarray:
        for visit in outlook.forecast.following(1):
            entry = self.numbering.entries[visit.module]
            experts = probable_experts(outlook.probable(visit.module))[:count]
            pages = (experts[:, None] * entry.num_slices + np.arange(entry.num_slices)).reshape(-1)
            planes = np.asarray([int(p) for p in visit.planes])
            found: np.ndarray = ((entry.first_index + pages[:, None]) * NUM_PLANES + planes).reshape(-1)
            return found[self.present[found]][:count]
        return np.zeros(0, dtype=np.int64)


def visit_of(event: Event) -> tuple[Visit, np.ndarray]:
    """The visit of a VISIT event, and its pages (numbers from 0 in the module)."""
    phase, module, bits = event.numbers[:3].tolist()
    planes = tuple(plane for plane in Plane if bits >> int(plane) & 1)
    return Visit(PHASES[phase], module, planes), event.numbers[3:].astype(np.int64)


def check_policy(name: str) -> PolicyName:
    """The name, if it is one of a policy. ValueError names those that there are."""
    known: tuple[PolicyName, ...] = get_args(PolicyName)
    for policy in known:
        if name == policy:
            return policy
    raise ValueError(f"policy {name!r} is unknown; choose among {', '.join(known)}")


def replay(
    trace: Trace,
    *,
    policy: PolicyName,
    budget: Budget,
    prefetch: bool = True,
    since: int = 0,
    together: bool = False,
) -> Moved:
    """What ``policy`` would have moved, from training step ``since`` on. See [Note: what a replay counts].

    Raises:
        ValueError: an unknown policy; a budget that is too small.
    """
    check_policy(policy)
    moved = Moved(policy, budget.bytes_of(trace.model.total_bytes))
    if policy == "min":
        replay_minimum(trace, budget, moved, since=since)
        return moved
    dirty = np.zeros(trace.model.numbering().num_pages, dtype=bool)
    chosen: Policy = Lru() if policy == "lru" else Ours(trace.model, dirty, prefetch=prefetch)
    _Machine(trace, budget, chosen, moved, dirty, since=since, together=together).run(trace)
    return moved
