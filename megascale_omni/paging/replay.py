"""Replays a trace under a residency policy and a budget: what would have been moved.

[Note: what a replay counts]
A page-in is a page that is brought to the device arena from anywhere; it is *demanded* when a lease waits for it and
*prefetched* when it comes before. Moves take no time here, so that policies are compared and not disks. Slot classes
share the budget as in a run, and none borrows from another. ``min`` is Belady's: it knows the whole trace and evicts
the page whose next use is farthest away. It may even evict pages that a lease still holds, so that nobody can have
fewer page-ins. ``ours`` runs the functions that a run runs (``outlook.py``, ``residency.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
import torch

from megascale_omni.paging.budget import Budget, ClassNeed, share, smallest_budget
from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.outlook import Outlook
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.recorder import PHASES
from megascale_omni.paging.residency import Candidates, choose_victims, displaced_before, pages_ahead, probable_experts
from megascale_omni.paging.shadow import ShadowLru, Shadows
from megascale_omni.paging.trace import Event, Op, Trace, TracedModel
from megascale_omni.schedule import Phase

PolicyName = Literal["lru", "ours", "min"]


@dataclass
class Moved:
    """What a replay moved."""

    policy: str
    budget_bytes: int
    page_ins: int = 0
    demanded_bytes: int = 0
    prefetched_bytes: int = 0
    written_bytes: int = 0
    uses: int = 0
    used_bytes: int = 0
    phases: dict[str, list[int]] = field(default_factory=dict)
    """Bytes that came in and bytes written, by the phase that was at work."""

    @property
    def bytes_in(self) -> int:
        """Bytes of all page-ins."""
        return self.demanded_bytes + self.prefetched_bytes

    def came(self, nbytes: int, phase: Phase) -> None:
        """A page was brought in."""
        self.page_ins += 1
        self.phases.setdefault(phase.value, [0, 0])[0] += nbytes

    def went(self, nbytes: int, phase: Phase) -> None:
        """A page was written."""
        self.written_bytes += nbytes
        self.phases.setdefault(phase.value, [0, 0])[1] += nbytes

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "bytes_in": self.bytes_in}


class Policy(Protocol):
    """Who leaves, and who is fetched early."""

    prefetches: bool

    def begin(self, visit: Visit, pages: np.ndarray) -> None:
        """A visit begins."""
        ...

    def step(self) -> None:
        """A training step begins."""
        ...

    def reach(self, page: int) -> None:
        """The visit has come to this page."""
        ...

    def use(self, page_ids: Sequence[int]) -> None:
        """Pages are used now (resident, or about to be)."""
        ...

    def victim(self, pages: np.ndarray, *, before: float, shadow: ShadowLru) -> int | None:
        """Which of ``pages`` (unpinned, of one class) leaves; None where all are needed sooner than ``before``."""
        ...


class Lru:
    """The page used longest ago leaves."""

    prefetches = False

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._clock = 0

    def begin(self, visit: Visit, pages: np.ndarray) -> None:
        """See Policy."""

    def step(self) -> None:
        """See Policy."""

    def reach(self, page: int) -> None:
        """See Policy."""

    def use(self, page_ids: Sequence[int]) -> None:
        """See Policy."""
        for page_id in page_ids:
            self._clock += 1
            self._used[page_id] = self._clock

    def victim(self, pages: np.ndarray, *, before: float, shadow: ShadowLru) -> int | None:
        """See Policy."""
        return min(pages.tolist(), key=lambda p: self._used.get(p, 0), default=None)


class Ours:
    """The policy of a run."""

    def __init__(self, model: TracedModel, dirty: np.ndarray, *, prefetch: bool = True) -> None:
        numbering = model.numbering()
        self.prefetches = prefetch
        self.outlook = Outlook(numbering)
        self._dirty = dirty
        self._last_use = np.zeros(numbering.num_pages, dtype=np.int64)
        self._clock = 0

    def begin(self, visit: Visit, pages: np.ndarray) -> None:
        """See Policy."""
        self.outlook.begin(visit, pages)

    def step(self) -> None:
        """See Policy."""
        self.outlook.end_step()

    def reach(self, page: int) -> None:
        """See Policy."""
        self.outlook.reached(page)

    def use(self, page_ids: Sequence[int]) -> None:
        """See Policy."""
        self._clock += 1
        self._last_use[page_ids] = self._clock

    def victim(self, pages: np.ndarray, *, before: float, shadow: ShadowLru) -> int | None:
        """See Policy."""
        candidates = Candidates(
            pages,
            self.outlook.next_use(pages),
            self._dirty[pages],
            self._last_use[pages],
            shadowed=shadow.holds(pages),
            allowance=shadow.allowance,
        )
        chosen = choose_victims(candidates, count=1, needed_before=before)
        return chosen[0] if chosen else None


class _Machine:
    """An arena that a policy looks after."""

    def __init__(self, trace: Trace, budget: Budget, policy: Policy, moved: Moved, dirty: np.ndarray) -> None:
        self.numbering = trace.model.numbering()
        self.policy, self.moved, self.dirty = policy, moved, dirty
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
            victim = self.policy.victim(pages, before=before, shadow=self.shadows.of(slot_class))
            if victim is None:
                if before == -np.inf:
                    raise ValueError(
                        f"the budget of {self.moved.budget_bytes} bytes is too small: all {self.slots[slot_class]} "
                        f"slots of {slot_class.nbytes} bytes are held at once; give more"
                    )
                return False
            if self.dirty[victim]:
                self.moved.went(slot_class.nbytes, self._phase)
                self.dirty[victim] = False
            self._leave(victim)
        self.used[slot_class] += 1
        return True

    def _leave(self, page_id: int) -> None:
        if self.resident[page_id]:
            self.used[self.classes[page_id]] -= 1
            self.resident[page_id] = False
            self.shadows.of_page(page_id).left(page_id)

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
    dtype, _, numel = kind.partition(" x ")
    return SlotClass(getattr(torch, dtype), int(numel))


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


def _minimum(trace: Trace, budget: Budget, moved: Moved) -> None:
    """Belady's MIN, slot class by slot class."""
    classes, slots = page_classes(trace.model), slots_of(trace.model, budget)
    uses, following, phases = _lifetimes(trace)
    resident: dict[SlotClass, dict[int, int]] = {c: {} for c in slots}  # page -> next use
    heaps: dict[SlotClass, list[tuple[int, int]]] = {c: [] for c in slots}
    dirty: set[int] = set()
    for (page_id, op), later, phase in zip(uses, following, phases, strict=True):
        slot_class = classes[page_id]
        here, heap = resident[slot_class], heaps[slot_class]
        if op is Op.WRITE:
            if page_id in here:
                dirty.add(page_id)
            else:  # evicted under the lease that writes it, which a run cannot do
                moved.went(slot_class.nbytes, phase)
            continue
        if op is Op.DROP:
            here.pop(page_id, None)
            dirty.discard(page_id)
            continue
        if op is Op.HOLD:
            moved.uses += 1
            moved.used_bytes += slot_class.nbytes
        if page_id not in here:
            if op is Op.HOLD:
                moved.came(slot_class.nbytes, phase)
                moved.demanded_bytes += slot_class.nbytes
            while len(here) >= slots[slot_class]:
                farthest, victim = heapq.heappop(heap)
                if here.get(victim) == -farthest:
                    del here[victim]
                    if victim in dirty:
                        moved.went(slot_class.nbytes, phase)
                        dirty.discard(victim)
        if op is Op.CREATE:
            dirty.add(page_id)
        here[page_id] = later
        heapq.heappush(heap, (-later, page_id))


def _lifetimes(trace: Trace) -> tuple[list[tuple[int, Op]], list[int], list[Phase]]:
    """(page, CREATE, HOLD, WRITE or DROP) one by one, when each page is used next (its number, or the end), phases."""
    uses: list[tuple[int, Op]] = []
    phases: list[Phase] = []
    phase = Phase.IDLE
    for event in trace:
        if event.op is Op.VISIT:
            phase = PHASES[int(event.numbers[0])]
        if event.op in (Op.CREATE, Op.HOLD, Op.DROP, Op.WRITE):
            uses += [(page_id, event.op) for page_id in event.numbers.tolist()]
            phases += [phase] * len(event.numbers)
    end = len(uses)
    following = [end] * end
    upcoming: dict[int, int] = {}
    for number in range(end - 1, -1, -1):
        page_id, op = uses[number]
        following[number] = upcoming.get(page_id, end)
        if op is Op.DROP:
            upcoming[page_id] = end
        elif op is not Op.WRITE:
            upcoming[page_id] = number
    return uses, following, phases


def replay(trace: Trace, *, policy: PolicyName, budget: Budget, prefetch: bool = True) -> Moved:
    """What ``policy`` would have moved. See [Note: what a replay counts].

    Raises:
        ValueError: an unknown policy; a budget that is too small.
    """
    if policy not in get_args(PolicyName):
        raise ValueError(f"policy {policy!r} is unknown; choose among {', '.join(get_args(PolicyName))}")
    moved = Moved(policy, budget.bytes_of(trace.model.total_bytes))
    if policy == "min":
        _minimum(trace, budget, moved)
        return moved
    dirty = np.zeros(trace.model.numbering().num_pages, dtype=bool)
    chosen: Policy = Lru() if policy == "lru" else Ours(trace.model, dirty, prefetch=prefetch)
    _Machine(trace, budget, chosen, moved, dirty).run(trace)
    return moved
