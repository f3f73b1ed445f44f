"""What is done to arenas between two steps: another size, compaction, and memory given back in an emergency.

Requests that come while pages are held are kept until the step has ended; none is lost. Where an adapter does not say
that a step has ended, the next one's beginning is its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.emergency import Emergency
from megascale_omni.paging.memory import MemoryProbe
from megascale_omni.paging.needs import check_budget, class_needs

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager


LONGEST_PAUSE_STEPS = 64
"""Between two compactions for an empty part that comes back each time."""


@dataclass(frozen=True)
class UpkeepOptions:
    """When arenas are looked after. The defaults never do it by themselves.

    Attributes:
        emergency_percent: of device memory; where less is free, pages give memory back [Note: emergency]. 0: never.
        compact_percent: of the device arena's memory; where more holds no page, it is compacted, if memory returns by
            it; and ever less often where all of it comes back before the next time. 100: never.
        compact_seconds: and where so much time has passed since the last compaction. 0: never.
    """

    emergency_percent: float = 0.0
    compact_percent: float = 100.0
    compact_seconds: float = 0.0


class Upkeep:
    """Looks after one manager's arenas."""

    def __init__(
        self,
        manager: ExpertManager,
        options: UpkeepOptions,
        *,
        probe: MemoryProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._options, self._clock = manager, options, clock
        self.emergency = Emergency(manager, least=options.emergency_percent / 100, probe=probe, clock=clock)
        self._resize_to: tuple[Budget, Budget | None] | None = None
        self._asked = False
        self._compacted = clock()
        self._reserved_before: int | None = None  # bytes of the arena when it was compacted for its empty part last,
        self._pause, self._ends_to_wait = 1, 0  # ends of steps between two such times, and those still to go by
        self._ended = True
        manager.schedule.on_step(self._begin)
        manager.schedule.on_step_end(self._end)

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        """Whether somebody holds pages."""
        return bool(self._manager.table.pins.any() or self._manager.pager.host.lent)

    @property
    def device_budget(self) -> Budget:
        """The budget asked for last, which may have to wait for the end of the step."""
        return self._manager.options.device_budget if self._resize_to is None else self._resize_to[0]

    @property
    def is_resizing(self) -> bool:
        """Whether it waits."""
        return self._resize_to is not None

    def resize(self, budget: Budget, host: Budget | None) -> None:
        """See :meth:`megascale_omni.paging.manager.ExpertManager.resize`."""
        if self._manager.pager.tiers.disk is None:
            raise ValueError(
                "pages cannot have another budget: the run has none, and every page stays in device memory; start it "
                "with --megascale-device-budget and --megascale-disk-path (100% keeps all pages until it is resized)"
            )
        check_budget(budget, class_needs(self._manager.modules))
        host = host or (self._resize_to or (None, None))[1]
        self._manager.shares.take_disk(budget, host or self._manager.options.host_budget)
        self._resize_to = budget, host
        if not self._busy:
            self._apply_resize()

    def compact(self) -> int | None:
        """See :meth:`megascale_omni.paging.manager.ExpertManager.compact`."""
        self._asked = True
        return None if self._busy else self._compact()

    # -- when ----------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """A sweep begins: whether there is an emergency."""
        self.emergency.look()

    def _end(self) -> None:
        self._ended = True
        if not self._busy:
            self._between_steps()

    def _begin(self) -> None:
        if not self._ended or self._asked or self._resize_to is not None:
            self._between_steps()
        self._ended = False

    def _between_steps(self) -> None:
        if self._resize_to is not None:
            self._apply_resize()
        if self._asked or self._is_time():
            self._compact()
        if self._manager.pager.can_evict:
            self.emergency.relax()
            self.emergency.look()

    def _is_time(self) -> bool:
        options = self._options
        if 0 < options.compact_seconds <= self._clock() - self._compacted:
            return True
        return options.compact_percent < 100 and self._is_worthwhile()

    def _is_worthwhile(self) -> bool:
        """Whether much of the arena is empty, whole segments of it, and has not just come back from having returned."""
        arena, least = self._manager.arena, self._options.compact_percent
        if self._ends_to_wait:
            self._ends_to_wait -= 1
            return False
        empty = arena.bytes_reserved - arena.bytes_used
        if 100 * empty <= least * arena.bytes_reserved or not arena.bytes_returnable:
            return False
        if self._reserved_before is not None:  # what returned then was wanted again
            came_back = arena.bytes_reserved >= self._reserved_before
            self._pause = min(2 * self._pause, LONGEST_PAUSE_STEPS) if came_back else 1
            self._ends_to_wait = self._pause - 1
        self._reserved_before = arena.bytes_reserved
        return True

    # -- what ----------------------------------------------------------------------------------------------------------

    def _apply_resize(self) -> None:
        wanted, self._resize_to = self._resize_to, None
        assert wanted is not None
        manager = self._manager
        manager.pager.settle()
        host = wanted[1] or manager.options.host_budget
        manager.options = replace(manager.options, device_budget=wanted[0], host_budget=host)
        manager.shares.apply()
        for slot_class in manager.arena.slot_classes():
            manager.pager.compact(slot_class)
        self._give_segments_back()

    def _compact(self) -> int:
        """Both arenas, see [Note: compaction]; the bytes that went back to the system."""
        self._asked, self._compacted = False, self._clock()
        pager, arena = self._manager.pager, self._manager.arena
        pager.land()
        freed = sum(pager.compact(slot_class, tight=True) for slot_class in arena.slot_classes())
        if not pager.host.lent:
            freed += sum(pager.host.shrink(c, tight=True) for c in pager.tiers.host.slot_classes())
        self._give_segments_back()
        pager.counts["compactions"] += 1
        pager.counts["bytes_compacted"] += freed
        return freed

    def _give_segments_back(self) -> None:
        if self._manager.arena.device.type == "cuda":
            torch.cuda.empty_cache()  # segments are the allocator's until it is told
