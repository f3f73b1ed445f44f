"""What each slot class has of the budgets: arenas get their limits, and pages beyond them leave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megascale_omni.paging.budget import Budget, share
from megascale_omni.paging.needs import class_needs

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager


class Shares:
    """Shares one manager's budgets among its slot classes."""

    def __init__(self, manager: ExpertManager) -> None:
        self._manager = manager

    def apply(self) -> None:
        """Gives every slot class its part of the budgets; pages beyond it leave, and memory returns.

        Raises:
            ValueError: memory does not hold all pages, and the disk has no room for them.
        """
        manager = self._manager
        manager.upkeep.emergency.lowered = False
        needs = class_needs(manager.modules)
        self.take_disk(manager.options.device_budget, manager.options.host_budget)
        for slot_class, slots in share(manager.options.device_budget, needs).items():
            manager.arena.set_limit(slot_class, slots)
            manager.pager.evict_down(slot_class)
        self.limit_host()

    def take_disk(self, device: Budget, host: Budget) -> None:
        """Takes disk space for all pages, where memory of these budgets does not hold them. Raises ValueError."""
        manager = self._manager
        disk = manager.pager.tiers.disk
        total = sum(need.pages * c.nbytes for c, need in class_needs(manager.modules).items())
        if disk is not None and device.bytes_of(total) + host.bytes_of(total) < total:
            disk.fill()

    def limit_host(self, *, less_by: int = 0) -> bool:
        """Gives slot classes their part of the host budget; or ``less_by`` bytes less than the host arena has now, if
        it has any and no page in it is being worked on. Whether it did.
        """
        manager = self._manager
        host = manager.pager.tiers.host
        if less_by and not (host.bytes_reserved and not manager.pager.host.lent):
            return False
        budget = Budget(nbytes=max(0, host.bytes_reserved - less_by)) if less_by else manager.options.host_budget
        without_floors = {c: replace(need, floor=0) for c, need in class_needs(manager.modules).items()}
        for slot_class, slots in share(budget, without_floors).items():
            host.set_limit(slot_class, slots)
            manager.pager.host.shrink(slot_class)
        return True
