"""A manager with few small pages and fewer slots, in a folder on disk."""

from pathlib import Path

import pytest
import torch

from megascale_omni.config import Checksum
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import Copier
from megascale_omni.paging.layout import ExpertShape, PageLayout, SlotClass
from megascale_omni.paging.leases import PagedModule
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.pager import Pager
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.residency import choose_victims
from tests.unit.paging.movers import ManualMover

CPU = torch.device("cpu")
SLOT = 4096
LAYOUT = PageLayout(ExpertShape(hidden=16, ffn=16, gated=True, bias=False), 16)  # one page of 3 KiB in fp32


class Pages:
    """One module of one-page experts (or more slices an expert) in fp32 and ``slots`` slots, weights only by default.

    Every page is written with its own value when it is made; :meth:`check` compares with the value written last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        experts: int = 6,
        slots: int = 3,
        host_slots: int = 0,
        planes: tuple[Plane, ...] = (Plane.WEIGHT,),
        layout: PageLayout = LAYOUT,
        prefetch: bool = True,
        checksum: Checksum = "crc32",
        mover: Mover | None = None,
        copier: Copier | None = None,
    ) -> None:
        options = PagingOptions(device_budget=Budget(nbytes=0), disk_path=folder, prefetch=prefetch, checksum=checksum)
        self.mover = ManualMover() if mover is None else mover
        self.manager = ExpertManager(device=CPU, options=options, mover=self.mover, copier=copier, poison=True)
        self.module: PagedModule = self.manager.add_module(
            path="experts", layout=layout, num_experts=experts, dtypes=dict.fromkeys(planes, torch.float32)
        )
        self.slot_class = self.module.slot_class(Plane.WEIGHT)
        self.manager.arena.set_limit(self.slot_class, slots)
        self.manager.pager.tiers.host.set_limit(self.slot_class, host_slots)
        self.values: dict[tuple[Plane, int], float] = {}
        self.now = 0.0  # seconds on the clock of a test that has one
        for expert in range(experts):
            self.create(expert)

    @property
    def jobs(self) -> ManualMover:
        """The mover whose jobs the test makes."""
        assert isinstance(self.mover, ManualMover)
        return self.mover

    @property
    def used(self) -> int:
        """Slots of the device arena that are taken."""
        return self.manager.arena.used(self.slot_class)

    @property
    def counts(self) -> dict[str, int]:
        """The manager's counters."""
        return self.manager.stats()

    def id(self, expert: int, plane: Plane = Plane.WEIGHT) -> int:
        """The page id of an expert's first slice."""
        return int(self.manager.ids(self.module, plane, [expert])[0])

    def create(self, expert: int, plane: Plane = Plane.WEIGHT) -> None:
        """Makes an expert's pages and writes them."""
        self.manager.create(self.module, plane, [expert])
        self.write(expert, 100.0 * int(plane) + expert, plane)

    def write(self, expert: int, value: float, plane: Plane = Plane.WEIGHT) -> None:
        """Writes an expert's pages through a lease."""
        with self.manager.lease(self.module, plane, [expert]) as lease:
            for slice_ in range(self.module.entry.num_slices):
                lease.page(expert, slice_).fill_(value + slice_ / 64)
            lease.mark_dirty()
        self.values[plane, expert] = value

    def read(self, expert: int, plane: Plane = Plane.WEIGHT) -> None:
        """Reads an expert's pages through a lease and compares."""
        with self.manager.lease(self.module, plane, [expert]) as lease:
            for slice_ in range(self.module.entry.num_slices):
                page = lease.page(expert, slice_)
                assert page.equal(torch.full_like(page, self.values[plane, expert] + slice_ / 64)), (expert, slice_)
            self.manager.check_integrity()

    def check(self) -> None:
        """Reads all pages."""
        for plane, expert in self.values:
            self.read(expert, plane)

    def send_away(self, *experts: int, plane: Plane = Plane.WEIGHT) -> None:
        """Makes pages leave, whatever the policy thinks, and waits for it."""
        for expert in experts:
            self.manager.pager.departures.evict(self.id(expert, plane))
        self.jobs.complete_all()
        self.manager.pager.poll()

    def tier(self, expert: int, plane: Plane = Plane.WEIGHT) -> str:
        """Where an expert's first page is."""
        return self.manager.table.state(self.id(expert, plane)).value


@pytest.fixture(autouse=True)
def one_page_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a module that imports it: batches, and so waves, are single pages."""
    monkeypatch.setattr("megascale_omni.paging.batches.BATCH_BYTES", SLOT)


def resident(pages: Pages) -> list[int]:
    """Experts whose weight pages are in the device arena."""
    return [expert for expert in range(pages.module.entry.num_experts) if pages.tier(expert) == "active"]


def compare_choices(pager: Pager) -> list[int]:
    """From here on whom the pager chooses is compared with what the policy says of a snapshot.

    Returns a list that grows: how many were chosen each time.
    """
    victims, numbers = pager.victims, []
    choose = victims.choose

    def compared(slot_class: SlotClass, *, count: int, before: float) -> list[int]:
        expected = choose_victims(victims.snapshot(slot_class), count=count, needed_before=before)
        found = choose(slot_class, count=count, before=before)
        assert found == expected, (found, expected)
        numbers.append(len(found))
        return found

    victims.choose = compared  # type: ignore[method-assign]
    return numbers
