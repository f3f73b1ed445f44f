"""Any sequence of operations on the manager does what a dictionary of pages would do, and keeps its books in order.

Every page is written with a number of its own when it is made, so that a slot given to two pages, a page that moved or
a page that kept the bytes of another one shows up as a wrong number.
"""

from collections import Counter
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from megascale_omni.paging import tiers
from megascale_omni.paging.layout import ExpertShape, PageLayout
from megascale_omni.paging.leases import Lease, PagedModule
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import PageKey, Plane

DTYPES = {Plane.WEIGHT: torch.bfloat16, Plane.GRADIENT: torch.float32, Plane.MASTER: torch.float32}
PLANES = st.sampled_from(list(DTYPES))
CHOICES = st.lists(st.integers(0, 2), unique=True, max_size=3)  # experts, taken modulo their number
SOME_MODULE = st.integers(0, 100)


class ManagerMachine(RuleBasedStateMachine):
    """The manager beside a model: the value of each page that exists, and the keys held by each open lease."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.manager = ExpertManager(device=torch.device("cpu"), poison=True)
        self.values: dict[PageKey, float] = {}
        self.held: dict[Lease, list[PageKey]] = {}
        self.made = self.dropped = 0
        # Segments of a few slots, so that arenas have many.
        self.small_segments = mock.patch.object(tiers, "SEGMENT_BYTES", 200)
        self.small_segments.start()

    def teardown(self) -> None:
        self.small_segments.stop()

    # -- the model -----------------------------------------------------------------------------------------------------

    def pick(self, module: int, choices: list[int]) -> tuple[PagedModule, list[int]]:
        chosen = self.manager.modules[module % len(self.manager.modules)]
        return chosen, sorted({choice % chosen.entry.num_experts for choice in choices})

    def keys(self, module: PagedModule, plane: Plane, experts: list[int]) -> list[PageKey]:
        return [PageKey(plane, module.entry.module, e, s) for e in experts for s in range(module.entry.num_slices)]

    def pins(self) -> Counter[PageKey]:
        return Counter(key for keys in self.held.values() for key in keys)

    def write(self, key: PageKey, page: torch.Tensor) -> None:
        """A value that no other page has (in bf16 too)."""
        used = set(self.values.values())
        self.values[key] = next(float(n) for n in range(1, 257) if n not in used)
        page.fill_(self.values[key])

    def check_page(self, key: PageKey, page: torch.Tensor) -> None:
        layout = self.manager.modules[key.module].layout
        assert page.dtype is DTYPES[key.plane]
        assert page.equal(torch.full((layout.page_numel(key.slice),), self.values[key], dtype=page.dtype)), key

    # -- what may happen -----------------------------------------------------------------------------------------------

    @initialize()
    def first_module(self) -> None:
        self.add_module(num_experts=2, ffn=5, bias=True)

    @precondition(lambda self: len(self.manager.modules) < 4)
    @rule(num_experts=st.integers(1, 3), ffn=st.integers(1, 6), bias=st.booleans())
    def add_module(self, num_experts: int, ffn: int, bias: bool) -> None:
        layout = PageLayout(ExpertShape(hidden=2, ffn=ffn, gated=True, bias=bias), rows=min(ffn, 2))
        path = f"module{len(self.manager.modules)}"
        self.manager.add_module(path=path, layout=layout, num_experts=num_experts, dtypes=DTYPES)

    @rule(module=SOME_MODULE, plane=PLANES, choices=CHOICES)
    def create(self, module: int, plane: Plane, choices: list[int]) -> None:
        chosen, experts = self.pick(module, choices)
        expected = [key for key in self.keys(chosen, plane, experts) if key not in self.values]
        created = self.manager.create(chosen, plane, experts)
        assert [self.manager.key(i) for i in created.tolist()] == expected
        for key, page_id in zip(expected, created.tolist(), strict=True):
            assert self.manager.page_tensor(page_id).isnan().all()
            self.write(key, self.manager.page_tensor(page_id))
        self.made += len(expected)

    @rule(module=SOME_MODULE, plane=PLANES, pages=st.integers(0, 5))
    def reserve(self, module: int, plane: Plane, pages: int) -> None:
        self.manager.arena.reserve(self.pick(module, [])[0].slot_class(plane), pages)

    @rule(target=leases, module=SOME_MODULE, plane=PLANES, choices=CHOICES)
    def lease(self, module: int, plane: Plane, choices: list[int]):
        chosen, experts = self.pick(module, choices)
        keys = self.keys(chosen, plane, experts)
        if not all(key in self.values for key in keys):
            with pytest.raises(RuntimeError, match="is leased but absent"):
                self.manager.lease(chosen, plane, experts)
            return hypothesis.stateful.multiple()
        lease = self.manager.lease(chosen, plane, experts)
        self.held[lease] = keys
        for key in keys:
            self.check_page(key, lease.page(key.expert, key.slice))
            assert (lease.views(key.expert, key.slice).down_rh == self.values[key]).all()
        return lease

    @rule(lease=leases)
    def write_through_a_lease(self, lease: Lease) -> None:
        for key in self.held[lease]:
            self.write(key, lease.page(key.expert, key.slice))
        lease.mark_dirty()
        assert all(self.manager.table.dirty[self.manager.numbering.page_id(key)] for key in self.held[lease])

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        lease.release()
        lease.release()  # again is nothing
        del self.held[lease]

    @precondition(lambda self: self.values)
    @rule(which=st.integers(0, 1000))
    def drop_one(self, which: int) -> None:
        key = sorted(self.values)[which % len(self.values)]
        ids = self.manager.numbering.page_ids(key.module, key.plane, [key.expert])[key.slice : key.slice + 1]
        if self.pins()[key]:
            with pytest.raises(RuntimeError, match=f"is removed while {self.pins()[key]} leases hold it"):
                self.manager.drop(ids)
            return
        self.manager.drop(ids)
        del self.values[key]
        self.dropped += 1
        with pytest.raises(RuntimeError, match="is removed but absent"):
            self.manager.drop(ids)

    @rule(module=SOME_MODULE, choices=CHOICES, planes=st.lists(PLANES, unique=True, min_size=1), breaks=st.booleans())
    def waves(self, module: int, choices: list[int], planes: list[Plane], breaks: bool) -> None:
        chosen, experts = self.pick(module, choices)
        keys = {plane: self.keys(chosen, plane, experts) for plane in planes}
        if not all(key in self.values for group in keys.values() for key in group):
            with pytest.raises(RuntimeError, match="is leased but absent"):
                list(self.manager.waves(chosen, experts, planes=planes))
            return
        seen: list[tuple[int, int]] = []
        for wave in self.manager.waves(chosen, experts, planes=planes):
            seen += wave.items
            assert not wave.fresh
            for plane, lease in wave.leases.items():
                self.held[lease] = [PageKey(plane, chosen.entry.module, *item) for item in wave.items]
                for key in self.held[lease]:
                    self.check_page(key, lease.page(key.expert, key.slice))
            self.books_are_in_order()
            for lease in wave.leases.values():
                del self.held[lease]
            if breaks:
                return
        assert seen == [(key.expert, key.slice) for key in keys[planes[0]]]

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        self.manager.check_integrity()
        numbering, table = self.manager.numbering, self.manager.table
        pins = self.pins()
        expected = [pins[numbering.key(i)] for i in range(numbering.num_pages)]
        assert table.pins.tolist() == expected
        assert self.manager.stats().get("pages_created", 0) == self.made
        assert self.manager.stats().get("pages_dropped", 0) == self.dropped

    @invariant()
    def exactly_the_created_pages_exist_and_hold_what_was_written(self) -> None:
        there = {
            PageKey(plane, module.entry.module, int(e), int(s))
            for module in self.manager.modules
            for plane in DTYPES
            for e, s in zip(*self.manager.present(module, plane).nonzero(), strict=True)
        }
        assert there == set(self.values)
        for key in there:
            self.check_page(key, self.manager.page_tensor(self.manager.numbering.page_id(key)))

    @invariant()
    def bytes_add_up(self) -> None:
        by_plane = dict.fromkeys((plane.name.lower() for plane in Plane), 0)
        for key in self.values:
            by_plane[key.plane.name.lower()] += self.manager.modules[key.module].slot_class(key.plane).nbytes
        assert self.manager.resident_bytes() == by_plane
        assert self.manager.arena.bytes_used == sum(by_plane.values()) <= self.manager.arena.bytes_reserved


TestManager = ManagerMachine.TestCase
TestManager.settings = hypothesis.settings(max_examples=60, stateful_step_count=30)
