"""What may happen to a pager, in any order: the rules of its random machine; what must hold is in ``modelled.py``."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, multiple, precondition, rule

from megascale_omni.paging.leases import Lease
from megascale_omni.paging.memory import FreeMemory
from megascale_omni.paging.planes import PageKey, Plane
from megascale_omni.paging.tiers import TierKind
from megascale_omni.schedule import Phase
from tests.unit.paging.modelled import DTYPES, PLENTY, SEGMENT_BYTES, ModelledPages
from tests.unit.paging.small import SLOT

PLANES = st.sampled_from(list(DTYPES))
EXPERTS = st.lists(st.integers(0, 4), unique=True, max_size=4).map(sorted)
MODULE = st.integers(0, 1)
CALLER_FAILED = KeyError


class PagerMachine(ModelledPages):
    """Operations on the manager beside its model."""

    leases = Bundle("leases")

    # -- what may happen -----------------------------------------------------------------------------------------------

    @rule(module=MODULE, plane=PLANES, experts=EXPERTS)
    def create(self, module: int, plane: Plane, experts: list[int]) -> None:
        self.create_and_write(module, plane, experts)

    @rule(target=leases, module=MODULE, plane=PLANES, experts=EXPERTS)
    def lease(self, module: int, plane: Plane, experts: list[int]):
        chosen = self.choose(module, experts)
        keys = self.keys(module, plane, chosen)
        if not self.there(*keys) or not self.fits(*keys):
            message = "is leased but absent" if not self.there(*keys) else "are held by leases at once"
            with pytest.raises(RuntimeError, match=message):
                self.manager.lease(self.module(module), plane, chosen)
            return multiple()
        lease = self.manager.lease(self.module(module), plane, chosen)
        self.held[lease] = keys
        for key in keys:
            self.check(key, lease.page(key.expert, key.slice))
        return lease

    @rule(lease=leases)
    def write_through_a_lease(self, lease: Lease) -> None:
        for key in self.held[lease]:
            self.write(key, lease.page(key.expert, key.slice))
        lease.mark_dirty()

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        lease.release()
        del self.held[lease]

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 1000))
    def drop(self, which: int) -> None:
        key = sorted(self.written)[which % len(self.written)]
        page = np.array([self.id(key)])
        if any(key in group for group in self.held.values()):
            with pytest.raises(RuntimeError, match="is removed while"):
                self.manager.drop(page)
            return
        self.manager.drop(page)
        del self.written[key]

    @rule(module=MODULE, plane=PLANES, experts=EXPERTS)
    def prefetch(self, module: int, plane: Plane, experts: list[int]) -> None:
        self.manager.pager.prefetch([self.id(key) for key in self.keys(module, plane, self.choose(module, experts))])

    @rule(module=MODULE, plane=PLANES, experts=EXPERTS)
    def send_away(self, module: int, plane: Plane, experts: list[int]) -> None:
        """As if the policy had chosen them."""
        pager = self.manager.pager
        pager.poll()
        flying = set(pager.flights)
        for page_id in map(self.id, self.keys(module, plane, self.choose(module, experts))):
            here = self.manager.table.tier[page_id] == TierKind.DEVICE and not self.manager.table.pins[page_id]
            if here and page_id not in flying:
                pager.departures.evict(page_id)

    @rule(module=MODULE, experts=EXPERTS, phase=st.sampled_from(list(Phase)), stops=st.integers(0, 8))
    def waves(self, module: int, experts: list[int], phase: Phase, stops: int) -> None:
        """Weights are read, gradients made or added to; the caller fails at wave ``stops``, if there is one."""
        chosen = self.choose(module, experts)
        if not self.there(*self.keys(module, Plane.WEIGHT, chosen)):
            return
        waves = self.manager.waves(
            self.module(module), chosen, planes=(Plane.WEIGHT, Plane.GRADIENT), phase=phase, create=Plane.GRADIENT
        )
        held = any(self.held.values())
        try:
            for number, wave in enumerate(waves):
                for expert, slice_ in wave.items:
                    weight, gradient = (PageKey(plane, module, expert, slice_) for plane in wave.leases)
                    self.check(weight, wave.leases[Plane.WEIGHT].page(expert, slice_))
                    assert ((expert, slice_) in wave.fresh) == (gradient not in self.written)
                    page = wave.leases[Plane.GRADIENT].page(expert, slice_)
                    if gradient in self.written:
                        self.check(gradient, page)
                if number == stops:
                    raise CALLER_FAILED
                for expert, slice_ in wave.items:
                    page = wave.leases[Plane.GRADIENT].page(expert, slice_)
                    self.write(PageKey(Plane.GRADIENT, module, expert, slice_), page)
                wave.leases[Plane.GRADIENT].mark_dirty()
                self.everything_is_where_it_should_be()
        except CALLER_FAILED:
            pass
        except RuntimeError as error:
            self.must_be_for_want_of_room(error, held)

    @rule(module=MODULE, experts=EXPERTS, zeros=st.booleans(), uses=st.booleans(), stops=st.integers(0, 8))
    def sweep(self, module: int, experts: list[int], zeros: bool, uses: bool, stops: int) -> None:
        """All planes of pages are written, as an optimizer does; one that ``uses`` gradients drops them as it goes."""
        names = [(key.expert, key.slice) for key in self.keys(module, Plane.WEIGHT, self.choose(module, experts))]
        planes = tuple(DTYPES)
        needed = [PageKey(p, module, *name) for name in names for p in planes if not (zeros and p is Plane.GRADIENT)]
        if not self.there(*needed):
            return
        sweep = self.manager.sweep(
            self.module(module),
            names,
            planes=planes,
            phase=Phase.STEP,
            write=True,
            zeros=(Plane.GRADIENT,) if zeros else (),
            released=lambda: self.forget(used),
        )
        held, used = any(self.held.values()), list[PageKey]()
        try:
            for number, (name, pages) in enumerate(sweep):
                for plane, page in zip(planes, pages, strict=True):
                    key = PageKey(plane, module, *name)
                    if key in self.written:
                        self.check(key, page)
                    else:
                        assert zeros
                        assert page.equal(torch.zeros_like(page))
                    self.write(key, page)
                if number == stops:
                    break
                if uses:
                    used.append(PageKey(Plane.GRADIENT, module, *name))
        except RuntimeError as error:
            self.must_be_for_want_of_room(error, held)
            for key in self.keys(module, Plane.GRADIENT, self.choose(module, experts)):
                # Zeros may have been made for the page where the sweep ended.
                if key not in self.written and self.manager.table.tier[self.id(key)] != TierKind.ABSENT:
                    self.manager.drop(np.array([self.id(key)]))

    def forget(self, used: list[PageKey]) -> None:
        for key in used:
            if not any(key in group for group in self.held.values()):
                self.manager.drop(np.array([self.id(key)]))
                del self.written[key]
        used.clear()

    @staticmethod
    def must_be_for_want_of_room(error: RuntimeError, held: bool) -> None:
        """A floor of a batch of weights and gradients is enough for whoever holds nothing else."""
        assert "are held by leases at once" in str(error)
        assert held

    @rule()
    def settle(self) -> None:
        self.manager.pager.settle()
        assert self.manager.pager.flights == {}

    @rule()
    def poll(self) -> None:
        self.manager.pager.poll()

    @rule()
    def next_step(self) -> None:
        self.steps += 1
        self.manager.schedule.begin_step(self.steps)

    @rule(slots=st.integers(4, 20))
    def change_limits(self, slots: int) -> None:
        """A limit of 4 slots holds a batch of two pages of two planes, or a page of all planes."""
        for slot_class in self.manager.arena.slot_classes():
            held = {key for group in self.held.values() for key in group if self.slot_class(key) == slot_class}
            self.manager.arena.set_limit(slot_class, max(slots, len(held)))
            self.manager.pager.evict_down(slot_class)
            assert self.manager.arena.used(slot_class) <= max(slots, len(held))

    @rule(slots=st.integers(0, 12))
    def change_host_limits(self, slots: int) -> None:
        """Pages beyond the limit sink to disk."""
        host = self.manager.pager.tiers.host
        for slot_class in host.slot_classes():
            host.set_limit(slot_class, slots)
            self.manager.pager.host.shrink(slot_class)
            assert host.used(slot_class) <= slots

    @rule()
    def compact(self) -> None:
        """Pages move together; memory that no page and no limit needs is gone."""
        arena = self.manager.arena
        for slot_class in arena.slot_classes():
            before = arena.capacity(slot_class) * slot_class.nbytes
            freed = self.manager.pager.compact(slot_class)
            assert arena.capacity(slot_class) * slot_class.nbytes == before - freed

    @rule()
    def compact_on_request(self) -> None:
        """Nothing but what the pages need is kept; where leases are held, it is done when they are not."""
        freed = self.manager.compact()
        assert (freed is None) == any(self.held.values())
        if freed is not None:
            self.nothing_is_kept_and_all_is_in_order()

    def nothing_is_kept_and_all_is_in_order(self) -> None:
        table, arena = self.manager.table, self.manager.arena
        assert not self.manager.pager.flights
        for slot_class in arena.slot_classes():
            assert arena.capacity(slot_class) - arena.used(slot_class) < max(1, SEGMENT_BYTES // slot_class.nbytes)
            index = table.index_of(slot_class)
            ids = np.nonzero((table.tier == TierKind.DEVICE) & (table.class_index == index))[0]
            slots = table.slot[sorted(ids.tolist(), key=lambda i: (i % len(Plane), i))].tolist()
            assert slots == sorted(slots)

    @rule()
    def end_step(self) -> None:
        """Does what was asked for while leases were held, where none is held any more."""
        asked, before = self.manager.upkeep._asked, self.manager.stats().get("compactions", 0)
        self.manager.schedule.end_step()
        if asked and not any(self.held.values()):
            assert self.manager.stats()["compactions"] == before + 1
            self.nothing_is_kept_and_all_is_in_order()

    @rule(missing=st.integers(1, 60 * SLOT))
    def memory_runs_out(self, missing: int) -> None:
        """Pages give memory back, clean ones before dirty ones; leases and what they need to work stay."""
        manager, arena, table = self.manager, self.manager.arena, self.manager.table
        manager.pager.poll()
        before = {c: (arena.limit(c) or 0, manager.pager.victims.snapshot(c)) for c in arena.slot_classes()}
        floors, reserved = manager.upkeep.emergency.states(), arena.bytes_reserved
        self.memory = FreeMemory(0, 5 * missing)  # twice 10 % of it is made free
        manager.upkeep.emergency._looked = float("-inf")
        manager.upkeep.emergency.look()
        self.memory = PLENTY
        assert arena.bytes_reserved <= reserved
        for slot_class, (limit, leaving) in before.items():
            assert min(limit, floors[slot_class].floor) <= (arena.limit(slot_class) or 0) <= limit
            here = table.tier[leaving.page_ids] == TierKind.DEVICE
            assert not ((here & ~leaving.dirty).any() and (~here & leaving.dirty).any())

    @rule(share=st.floats(0.0, 1.0))
    def memory_is_free_again(self, share: float) -> None:
        arena = self.manager.arena
        before = {c: arena.limit(c) or 0 for c in arena.slot_classes()}
        self.memory = FreeMemory(int(share * 200 * SLOT), 200 * SLOT)
        self.manager.upkeep.emergency.relax()
        self.memory = PLENTY
        assert all((arena.limit(c) or 0) >= limit for c, limit in before.items())
