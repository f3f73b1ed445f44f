"""Whole modules: all pages of one at once, before the host knows which of its experts have tokens.

[Note: counts that come later]
Where no page ever leaves the device, nothing that is launched for a module depends on which experts have tokens: the
addresses of all pages are known, and kernels read from the device how many rows each has. So the host does not wait for
the numbers. What it keeps books about comes later, in the order of the calls: when somebody asks which gradients there
are, wants pages in any other way, or when a next call finds that numbers have come. Until then

* a backward makes gradient pages for all experts. Those of experts without tokens are *provisional*: no kernel touches
  them, and they are absent again before anybody sees them, so that an expert without tokens is not stepped as if it had
  had a gradient;
* whether a gradient page holds anything is known on the device (``written``: tokens that have been added to it);
* observers are told later what they would have been told, of the experts that had tokens.

Pages that are behind the optimizer [Note: deferred steps] are caught up on the device, too, which finds those that are
read; catching up all would step experts that nobody asked for. The page table hears of it with the numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from megascale_omni.bulk import on_device
from megascale_omni.paging.batches import RESIDENT_BATCH_BYTES, cut_batches
from megascale_omni.paging.forecast import Visit
from megascale_omni.paging.leases import PagedModule, WholeWave
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.tiers import ABSENT, DEVICE
from megascale_omni.schedule import Phase

if TYPE_CHECKING:
    from megascale_omni.paging.manager import ExpertManager


class Coming(Protocol):
    """Numbers of tokens ``[E]``, int64, on the device and on their way to the host.

    ``caught_up_at``: the optimizer's step up to which pages of experts with tokens have been caught up, -1 for none.
    """

    on_device: torch.Tensor
    caught_up_at: int

    @property
    def have_come(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        ...

    def wait(self) -> list[int]:
        """The numbers."""
        ...


@dataclass(frozen=True)
class CaughtUp:
    """Pages (numbers in their module, ascending) that have taken all steps up to ``step`` if their expert has tokens;
    ``written``: ids of what that changed of each, weight first.
    """

    pages: tuple[int, ...]
    written: tuple[np.ndarray, ...]
    step: int


class CatchesUpAhead(Protocol):
    """The optimizer of a module, as far as it catches up pages whose experts only the device knows."""

    def is_possible(self, module: PagedModule) -> bool:
        """Whether it can, now."""
        ...

    def replay(self, module: PagedModule, coming: Coming, *, known: bool) -> CaughtUp | None:
        """Launches what pages of experts with tokens have missed; None where no page has missed anything.

        ``known``: the host has heard of all calls before this one.
        """
        ...


@dataclass(frozen=True)
class _Call:
    """A forward or backward of a module whose numbers the host has not seen yet, or only what it caught up."""

    module: PagedModule
    coming: Coming
    num_rows: int
    planes: tuple[Plane, ...]
    phase: Phase
    create: Plane | None
    caught_up: CaughtUp | None
    computed: bool


@dataclass
class _Gradients:
    """Of one module: pages (ids) made for experts that may have no tokens, and what the device knows of all of them."""

    provisional: set[int] = field(default_factory=set)
    written_E: torch.Tensor | None = None
    torn: bool = False
    """Whether a call ended before its kernels had written all that ``written_E`` says."""


class WholeModules:
    """The modules of one manager that are computed whole; see [Note: counts that come later]."""

    def __init__(self, manager: ExpertManager) -> None:
        self._manager = manager
        self._calls: deque[_Call] = deque()
        self._gradients: dict[int, _Gradients] = {}
        self._addresses: dict[tuple[int, int], torch.Tensor] = {}
        self._follows_moves = False
        self._ahead: dict[int, CatchesUpAhead | None] = {}
        self.unsettled = False
        """Whether calls were made of which the host may know no numbers yet, or pages may be provisional."""

    def catch_up_by(self, module: PagedModule, ahead: CatchesUpAhead | None, *, needed: bool) -> None:
        """Who catches up a module's pages; ``needed``: whether they are ever behind."""
        self._ahead.pop(module.entry.module, None)
        if needed:
            self._ahead[module.entry.module] = ahead

    def is_possible(self, module: PagedModule) -> bool:
        """Whether all weights of a module are in the device arena, for good, and can be caught up there."""
        manager, number = self._manager, module.entry.module
        if manager.pager.can_evict:
            return False
        ahead = self._ahead.get(number)
        if number in self._ahead and (ahead is None or not ahead.is_possible(module)):
            return False
        ids = manager.ids(module, Plane.WEIGHT, range(module.entry.num_experts))
        return bool((manager.table.tier[ids] == DEVICE).all())

    def waves(
        self,
        module: PagedModule,
        coming: Coming,
        *,
        num_rows: int,
        planes: Sequence[Plane],
        phase: Phase,
        create: Plane | None = None,
    ) -> Iterator[WholeWave]:
        """One wave of all pages of a module; as :meth:`ExpertManager.waves`, for at most ``num_rows`` rows."""
        manager = self._manager
        while self._calls and self._calls[0].coming.have_come:
            self._hear_next()
        experts = range(module.entry.num_experts)
        ids = np.concatenate([manager.ids(module, plane, experts) for plane in planes])
        gradients, written_E = None, None
        new: list[int] = []
        pinned = False
        self.unsettled = True
        try:
            if create is not None:
                written_E, new = self._make(module, create)
                self._gradients[module.entry.module].torn = True
                gradients = self._table(module, create)
                manager.before_write(manager.ids(module, create, experts))
            weights = self._table(module, Plane.WEIGHT)
            manager.table.pin(ids)
            pinned = True
            caught_up = self._catch_up(module, coming)
            call = _Call(module, coming, num_rows, tuple(planes), phase, create, caught_up, computed=False)
            self._calls.append(call)
            yield WholeWave(weights_I=weights, gradients_I=gradients, written_E=written_E)
            self._calls[-1] = replace(call, computed=True)
            new = []
            if create is not None:
                self._gradients[module.entry.module].torn = False
        finally:
            if pinned:
                manager.table.unpin(ids)
            self._drop(module, new)

    def _catch_up(self, module: PagedModule, coming: Coming) -> CaughtUp | None:
        ahead = self._ahead.get(module.entry.module)
        if ahead is None:
            return None
        known = not any(call.module is module and call.caught_up is not None for call in self._calls)
        return ahead.replay(module, coming, known=known)

    # -- gradient pages ------------------------------------------------------------------------------------------------

    def _make(self, module: PagedModule, plane: Plane) -> tuple[torch.Tensor, list[int]]:
        """Gives every expert gradient pages; what the device knows of them, and the ids of those that are new."""
        manager, state = self._manager, self._gradients.setdefault(module.entry.module, _Gradients())
        if state.torn:  # the device may have noted tokens that no kernel has added to a page: it is told anew
            self.settle()
            state.torn, self.unsettled = False, True
        ids = manager.ids(module, plane, range(module.entry.num_experts))
        absent = manager.table.tier[ids] == ABSENT
        if state.written_E is None or not (state.provisional or self._adds_to(module)):
            # The host knows all: whoever has pages has added to them.
            has = ~absent.reshape(module.entry.num_experts, module.entry.num_slices).any(axis=1)
            state.written_E = on_device(has.astype(np.int64), manager.arena.device)
        made: list[int] = []
        try:
            for page_id in ids[absent].tolist():
                manager.pager.create(page_id)
                made.append(page_id)
        except BaseException:
            self._drop(module, made)
            raise
        state.provisional.update(made)
        return state.written_E, made

    def _adds_to(self, module: PagedModule) -> bool:
        return any(call.module is module and call.create is not None and call.computed for call in self._calls)

    def _drop(self, module: PagedModule, page_ids: list[int]) -> None:
        """Pages that nobody has heard of are absent again."""
        for page_id in page_ids:
            self._manager.pager.drop(page_id)
        if page_ids:
            self._gradients[module.entry.module].provisional.difference_update(page_ids)

    # -- what the host hears later -------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits for the numbers of all calls so far, once: from here on the page table says what it always says."""
        if self._calls:
            self._calls[-1].coming.wait()
        while self._calls:
            self._hear_next()
        for number, state in self._gradients.items():
            if state.provisional:
                self._drop(self._manager.modules[number], sorted(state.provisional))
        self.unsettled = False

    def _hear_next(self) -> None:
        self._hear(self._calls[0])  # numbers that cannot be are heard of again: gradients have something of them
        self._calls.popleft()

    def _hear(self, call: _Call) -> None:
        manager, entry = self._manager, call.module.entry
        counts = np.asarray(call.coming.wait(), dtype=np.int64)
        current = self._caught_up(call, counts)
        if counts.sum() > call.num_rows:
            raise RuntimeError(
                f"{manager.numbering.path(entry.module)}: experts got {counts.sum()} tokens, room was made for "
                f"{call.num_rows}; nothing of them was computed"
            )
        active = np.nonzero(counts)[0].tolist()
        if not call.computed:
            return
        if manager.observers:
            self._tell(call, counts, active, current)
        if call.create is not None:
            ids = manager.ids(call.module, call.create, active)
            manager.table.dirty[ids] = True
            manager.table.changed[ids] = True
            self._gradients[entry.module].provisional.difference_update(ids.tolist())

    def _caught_up(self, call: _Call, counts: np.ndarray) -> dict[int, np.ndarray]:
        """Notes pages that were behind and are not any more: their numbers, and the ids of what was written."""
        found, manager, entry = call.caught_up, self._manager, call.module.entry
        if found is None:
            return {}
        slices = entry.num_slices
        current = {p: ids for p, ids in zip(found.pages, found.written, strict=True) if counts[p // slices]}
        current = {p: ids for p, ids in current.items() if manager.table.last_step[ids[0]] < found.step}
        for ids in current.values():
            manager.table.last_step[ids[0]] = found.step
            manager.table.dirty[ids] = True
            manager.table.changed[ids] = True
        return current

    def _tell(self, call: _Call, counts: np.ndarray, active: list[int], current: dict[int, np.ndarray]) -> None:
        """Tells observers of a call in the words of a sweep that knew its experts."""
        manager, module = self._manager, call.module
        entry, provisional = module.entry, self._gradients.get(module.entry.module, _Gradients()).provisional
        pages = (np.asarray(active, dtype=np.int64)[:, None] * entry.num_slices + np.arange(entry.num_slices)).ravel()
        visit = Visit(call.phase, entry.module, call.planes)
        nbytes = RESIDENT_BATCH_BYTES if manager.arena.device.type == "cuda" else None
        dtype = module.dtypes[Plane.WEIGHT]
        batches = cut_batches(module.layout, dtype=dtype, experts=active, nbytes=nbytes)
        for observer in manager.observers:
            if call.phase is Phase.FORWARD:
                observer.routed(entry.module, counts)
            observer.visited(visit, pages)
            for items in batches:
                ids = {plane: module.ids(plane, items) for plane in call.planes}
                for number in (expert * entry.num_slices + slice_ for expert, slice_ in items):
                    if number in current:
                        observer.held(current[number])
                        observer.written(current[number])
                        observer.released(current[number])
                for plane in call.planes:
                    new = ids[plane][[page_id in provisional for page_id in ids[plane].tolist()]]
                    if len(new):
                        observer.created(new)
                    observer.held(ids[plane])
                observer.reached(items[-1][0] * entry.num_slices + items[-1][1])
                if call.create is not None:
                    observer.written(ids[call.create])
                for plane in call.planes:
                    observer.released(ids[plane])

    # -- addresses -----------------------------------------------------------------------------------------------------

    def _table(self, module: PagedModule, plane: Plane) -> torch.Tensor:
        """Addresses of all pages of a plane, int64 ``[pages]``, on the device; made anew when a page has moved."""
        key = module.entry.module, plane
        if key not in self._addresses:
            if not self._follows_moves:
                self._follow_moves()
            ids = self._manager.ids(module, plane, range(module.entry.num_experts))
            tensors = map(self._manager.pager.tensor, ids.tolist())
            found = np.asarray([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
            self._addresses[key] = on_device(found, self._manager.arena.device)
        return self._addresses[key]

    def _follow_moves(self) -> None:
        others, self._follows_moves = self._manager.pager.on_move, True

        def moved(page_id: int) -> None:
            others(page_id)
            if self._addresses:
                index, plane = divmod(page_id, NUM_PLANES)  # of every gradient page, twice a step
                self._addresses.pop((self._manager.numbering.module_of(index), plane), None)

        self._manager.pager.on_move = moved
