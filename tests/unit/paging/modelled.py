"""What the random machine of the pager knows: what every page must hold, and what always holds of the manager.

Beside the manager runs a dictionary of what was last written to each page. After every operation all pages are compared
with it where they lie (device, host memory or file), not through leases, which would move them.
"""

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.layout import ExpertShape, PageLayout, SlotClass
from megascale_omni.paging.leases import Lease, PagedModule
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.memory import FreeMemory
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.planes import PageKey, Plane
from megascale_omni.paging.tiers import TierKind
from megascale_omni.paging.upkeep import UpkeepOptions
from tests.unit.paging.movers import ManualMover
from tests.unit.paging.small import SLOT, compare_choices

DTYPES = {Plane.WEIGHT: torch.bfloat16, Plane.GRADIENT: torch.float32, Plane.MASTER: torch.float32}
SEGMENT_BYTES = 4 * SLOT
PLENTY = FreeMemory(1000, 1000)


class ModelledPages(RuleBasedStateMachine):
    """The manager beside a model: what was written to each page that exists, and the pages held by each lease."""

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
