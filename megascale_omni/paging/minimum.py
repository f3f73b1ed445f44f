"""Belady's MIN over a trace, and what a replay counts."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, field

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.recorder import PHASES
from megascale_omni.paging.trace import Op, Trace
from megascale_omni.paging.traced_slots import page_classes, slots_of
from megascale_omni.schedule import Phase


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

    def restart(self) -> None:
        """Forgets what was counted."""
        self.page_ins = self.demanded_bytes = self.prefetched_bytes = self.written_bytes = 0
        self.uses = self.used_bytes = 0
        self.phases.clear()

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


def replay_minimum(trace: Trace, budget: Budget, moved: Moved, *, since: int) -> None:
    """Belady's MIN, slot class by slot class. Counts from training step ``since`` on."""
    classes, slots = page_classes(trace.model), slots_of(trace.model, budget)
    uses, following, phases = _lifetimes(trace)
    resident: dict[SlotClass, dict[int, int]] = {c: {} for c in slots}  # page -> next use
    heaps: dict[SlotClass, list[tuple[int, int]]] = {c: [] for c in slots}
    dirty: set[int] = set()
    for (page_id, op), later, phase in zip(uses, following, phases, strict=True):
        if op is Op.STEP:
            if page_id == since:
                moved.restart()
            continue
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
    """(page, CREATE, HOLD, WRITE or DROP) one by one, when each page is used next (its number, or the end), phases.

    STEP stands among them with the step's number.
    """
    uses: list[tuple[int, Op]] = []
    phases: list[Phase] = []
    phase = Phase.IDLE
    for event in trace:
        if event.op is Op.VISIT:
            phase = PHASES[int(event.numbers[0])]
        if event.op in (Op.CREATE, Op.HOLD, Op.DROP, Op.WRITE, Op.STEP):
            uses += [(page_id, event.op) for page_id in event.numbers.tolist()]
            phases += [phase] * len(event.numbers)
    end = len(uses)
    following = [end] * end
    upcoming: dict[int, int] = {}
    for number in range(end - 1, -1, -1):
        page_id, op = uses[number]
        if op is Op.STEP:
            continue
        following[number] = upcoming.get(page_id, end)
        if op is Op.DROP:
            upcoming[page_id] = end
        elif op is not Op.WRITE:
            upcoming[page_id] = number
    return uses, following, phases
