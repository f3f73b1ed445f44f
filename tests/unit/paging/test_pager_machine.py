"""Any sequence of operations under a small budget keeps every page's bytes, wherever the page is.

Beside the manager runs a dictionary of what was last written to each page. After every operation all pages are compared
with it where they lie (device, host memory or file), not through leases, which would move them. One machine decides by
itself in which order jobs end, so that a failure comes back; the other has real io threads.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import ExpertShape, PageLayout, SlotClass
from megascale_omni.paging.leases import Lease, PagedModule
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.memory import FreeMemory
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.planes import PageKey, Plane
from megascale_omni.paging.tiers import TierKind
from megascale_omni.paging.upkeep import UpkeepOptions
from megascale_omni.schedule import Phase
from tests.unit.paging.movers import ManualMover
from tests.unit.paging.small import SLOT, compare_choices

DTYPES = {Plane.WEIGHT: torch.bfloat16, Plane.GRADIENT: torch.float32, Plane.MASTER: torch.float32}
PLANES = st.sampled_from(list(DTYPES))
EXPERTS = st.lists(st.integers(0, 4), unique=True, max_size=4).map(sorted)
MODULE = st.integers(0, 1)
CALLER_FAILED = KeyError
SEGMENT_BYTES = 4 * SLOT
PLENTY = FreeMemory(1000, 1000)


class PagerMachine(RuleBasedStateMachine):
    """The manager beside a model: what was written to each page that exists, and the pages held by each lease."""

    leases = Bundle("leases")

    def make_mover(self, seed: int) -> Mover:
        return ManualMover(seed)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="megascale-test-")
        self.batches = mock.patch("megascale_omni.paging.batches.BATCH_BYTES", 2 * SLOT)
        self.batches.start()
        self.segments = mock.patch("megascale_omni.paging.tiers.SEGMENT_BYTES", SEGMENT_BYTES)
        self.segments.start()
        self.written: dict[PageKey, int] = {}
        self.held: dict[Lease, list[PageKey]] = {}
        self.writes = 0
        self.steps = 0

    @initialize(
        seed=st.integers(0, 2**16),
        fraction=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
        host=st.sampled_from([0, 3, 12, 100]),
        prefetch=st.booleans(),
        slack=st.sampled_from([0, 8]),
        compact=st.sampled_from([30.0, 100.0]),
    )
    def start(self, seed: int, fraction: float, host: int, prefetch: bool, slack: int, compact: float) -> None:
        options = PagingOptions(
            device_budget=Budget(fraction=fraction),  # raised to the floors
            host_budget=Budget(nbytes=host * SLOT),
            disk_path=self.folder,
            checksum="crc32",
            prefetch=prefetch,
            upkeep=UpkeepOptions(emergency_percent=10.0, compact_percent=compact),
        )
        self.slack = mock.patch("megascale_omni.paging.shadow.LEAST_SLACK", slack)
        self.slack.start()
        self.mover = self.make_mover(seed)
        self.memory = PLENTY
        self.manager = ExpertManager(
            device=torch.device("cpu"),
            options=options,
            mover=self.mover,
            memory=lambda: self.memory,
            poison=True,
        )
        for number, (experts, ffn, rows) in enumerate(((4, 24, 16), (5, 16, 16))):
            layout = PageLayout(ExpertShape(hidden=16, ffn=ffn, gated=True, bias=number == 0), rows)
            self.manager.add_module(path=f"module{number}", layout=layout, num_experts=experts, dtypes=DTYPES)
        compare_choices(self.manager.pager)
        self.disk = self.manager.pager.tiers.disk
        assert self.disk is not None
        for number in (0, 1):
            for plane in (Plane.WEIGHT, Plane.MASTER):
                self.create_and_write(number, plane, list(range(5)))

    def teardown(self) -> None:
        self.batches.stop()
        self.segments.stop()
        if hasattr(self, "manager"):
            self.slack.stop()
            self.manager.close()
            assert not list(Path(self.folder).iterdir())
        shutil.rmtree(self.folder)

    # -- the model -----------------------------------------------------------------------------------------------------

    def module(self, number: int) -> PagedModule:
        return self.manager.modules[number]

    def choose(self, module: int, experts: list[int]) -> list[int]:
        return [expert for expert in experts if expert < self.module(module).entry.num_experts]

    def keys(self, module: int, plane: Plane, experts: list[int]) -> list[PageKey]:
        slices = self.module(module).entry.num_slices
        return [PageKey(plane, module, e, s) for e in experts for s in range(slices)]

    def slot_class(self, key: PageKey) -> SlotClass:
        return self.module(key.module).slot_class(key.plane)

    def fits(self, *keys: PageKey) -> bool:
        """Whether these pages can be held beside those that are."""
        held = {key for group in self.held.values() for key in group}.union(keys)
        counts = Counter(self.slot_class(key) for key in held)
        return all(count <= (self.manager.arena.limit(c) or 0) for c, count in counts.items())

    def there(self, *keys: PageKey) -> bool:
        return all(key in self.written for key in keys)

    def id(self, key: PageKey) -> int:
        return self.manager.numbering.page_id(key)

    def content(self, key: PageKey, number: int) -> torch.Tensor:
        """What write ``number`` puts into a page: every element is its own, for every write."""
        numel = self.module(key.module).layout.page_numel(key.slice)
        integers = torch.int16 if DTYPES[key.plane] is torch.bfloat16 else torch.int32
        return (torch.arange(numel) * 7 + number * 131).to(integers).view(DTYPES[key.plane])

    def write(self, key: PageKey, page: torch.Tensor) -> None:
        self.writes += 1
        self.written[key] = self.writes
        page.copy_(self.content(key, self.writes))

    def check(self, key: PageKey, page: torch.Tensor) -> None:
        expected = self.content(key, self.written[key]).view(torch.uint8)
        assert page.contiguous().view(torch.uint8).equal(expected), key

    # -- what may happen -----------------------------------------------------------------------------------------------

    @rule(module=MODULE, plane=PLANES, experts=EXPERTS)
    def create_and_write(self, module: int, plane: Plane, experts: list[int]) -> None:
        for expert in self.choose(module, experts):
            new = [key for key in self.keys(module, plane, [expert]) if key not in self.written]
            if not self.fits(*new):
                with pytest.raises(RuntimeError, match="are held by leases at once"):
                    self.manager.create(self.module(module), plane, [expert])
                continue
            created = self.manager.create(self.module(module), plane, [expert])
            assert [self.manager.key(i) for i in created.tolist()] == new
            with self.manager.lease_ids(self.module(module), plane, created) as lease:
                for key in new:
                    self.write(key, lease.page(key.expert, key.slice))
                lease.mark_dirty()

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

    @rule(module=MODULE, experts=EXPERTS, zeros=st.booleans(), stops=st.integers(0, 8))
    def sweep(self, module: int, experts: list[int], zeros: bool, stops: int) -> None:
        """All planes of pages are written, as an optimizer does."""
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
        )
        held = any(self.held.values())
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
        except RuntimeError as error:
            self.must_be_for_want_of_room(error, held)
            for key in self.keys(module, Plane.GRADIENT, self.choose(module, experts)):
                # Zeros may have been made for the page where the sweep ended.
                if key not in self.written and self.manager.table.tier[self.id(key)] != TierKind.ABSENT:
                    self.manager.drop(np.array([self.id(key)]))

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

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager, table = self.manager, self.manager.table
        manager.check_integrity()
        assert {manager.key(int(i)) for i in np.nonzero(table.tier != TierKind.ABSENT)[0]} == set(self.written)
        for slot_class in manager.arena.slot_classes():
            limit = manager.arena.limit(slot_class)
            assert limit is not None
            assert manager.arena.used(slot_class) <= limit
        for key in self.written:
            page_id = self.id(key)
            numel = self.module(key.module).layout.page_numel(key.slice)
            tier = TierKind(table.tier[page_id])
            if tier is TierKind.DEVICE:
                self.check(key, manager.pager.tensor(page_id)[:numel])
            elif tier is TierKind.HOST:
                slot = manager.pager.tiers.host.tensor(self.slot_class(key), int(table.slot[page_id]))
                self.check(key, slot[:numel])
            if not table.dirty[page_id]:
                self.check(key, self.on_disk(key)[:numel])

    def on_disk(self, key: PageKey) -> torch.Tensor:
        """What the file holds for a page, which must be what its checksum says."""
        slot_class = self.slot_class(key)
        raw = torch.empty(slot_class.stride + SLOT, dtype=slot_class.dtype)
        start = -raw.data_ptr() % SLOT // slot_class.dtype.itemsize
        buffer = raw[start : start + slot_class.stride]
        assert self.disk is not None
        self.disk.read(int(self.manager.table.disk_offset[self.id(key)]), buffer, name=lambda: str(key))
        return buffer


class ChosenOrder(PagerMachine):
    """Jobs end when the machine says so."""

    @rule(index=st.integers(0, 100))
    def a_job_ends(self, index: int) -> None:
        assert isinstance(self.mover, ManualMover)
        if self.mover.pending:
            self.mover.complete(index=index % len(self.mover.pending))


class IoThreads(PagerMachine):
    """Real io threads."""

    def make_mover(self, seed: int) -> Mover:
        return Mover(readers=2, writers=2)


TestChosenOrder = ChosenOrder.TestCase
TestChosenOrder.settings = hypothesis.settings(max_examples=30, stateful_step_count=40)
TestIoThreads = IoThreads.TestCase
TestIoThreads.settings = hypothesis.settings(max_examples=12, stateful_step_count=40)
