"""Many pages, gradients or rows at once: kernels make the bits that torch makes one by one, where runs use them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megascale_omni.bulk import TORCH, Bulk, Factor, bulk_for
from megascale_omni.clipping import ClipConfig, CMSAClipper
from megascale_omni.experts.gradients import ExpertGradients
from megascale_omni.experts.shards import PageShards
from megascale_omni.kernels import bulk as kernels
from megascale_omni.kernels.bulk import KernelBulk
from megascale_omni.optimizer.together import Together
from megascale_omni.paging import manager as managers
from megascale_omni.paging import readers
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.copies import FEWEST, StreamCopier
from megascale_omni.paging.disk import DiskFile, PageIoError
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import aligned_empty
from scripts.measurements.paging_model import Task, train
from tests.unit.experts.paged import small_experts
from tests.unit.kernels.test_elementwise import pages_of
from tests.unit.paging.late_streams import LateStreams
from tests.unit.paging.movers import ManualMover
from tests.unit.paging.small import Pages

CPU = torch.device("cpu")


@pytest.fixture
def bulk() -> Bulk:
    return KernelBulk()


def counted(monkeypatch, name: str) -> list[int]:
    """How many things each launch of a kernel was given, from now on."""
    calls, launch = list[int](), getattr(kernels, name)

    def counting(first, *rest, **more):
        calls.append(len(first))
        return launch(first, *rest, **more)

    monkeypatch.setattr(kernels, name, counting)
    return calls


def test_it_is_chosen_by_device_and_can_be_forced():
    assert bulk_for(CPU).name == bulk_for(CPU, choice="torch").name == "torch"
    assert bulk_for(CPU, choice="triton").name == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_copies_and_products_have_the_bits_of_torch(bulk, dtype, monkeypatch):
    launched = counted(monkeypatch, "copy_pages")
    sources, targets = (
        [*pages_of(4, 64, dtype), *pages_of(2, 10, dtype)],
        [*pages_of(4, 64, dtype), *pages_of(2, 10, dtype)],
    )
    bulk.copy(list(zip(sources, targets, strict=True)))
    assert all(map(torch.equal, sources, targets))
    assert launched == [4], "two alone are not worth a launch"
    given: list[list[Factor]] = [[0.3, 1.0], [torch.tensor(0.77), 0.1]]
    for factors in given:  # on a CPU, where torch rounds no factor
        groups = [pages_of(3, 100, dtype), pages_of(1, 7, dtype)]
        expected = [[page.clone() for page in group] for group in groups]
        bulk.scale(groups, factors)
        TORCH.scale(expected, factors)
        for group, others in zip(groups, expected, strict=True):
            assert all(map(torch.equal, group, others))


@pytest.mark.parametrize("add", [True, False])
def test_the_wire_has_the_bits_of_torch(bulk, add):
    gradients, found = pages_of(3, 500), []
    for each in (bulk, TORCH):
        wire = torch.empty(1500, dtype=torch.bfloat16)
        each.pack(gradients, wire)
        back = [torch.full_like(gradient, 0.1) for gradient in gradients]
        each.unpack(wire, back, add=add)
        found.append([wire, *back])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_taken_and_summed_in_the_bits_of_torch(bulk, dtype):
    values = torch.randn(12, 40).to(dtype)
    items, starts = torch.randperm(12), torch.tensor([0, 3, 3, 7])
    assert torch.equal(bulk.take_rows(values, items), TORCH.take_rows(values, items))
    expected = TORCH.sum_segments(values.float(), items, starts).to(dtype)  # of bf16 a CPU adds up in bf16
    assert torch.equal(bulk.sum_segments(values, items, starts), expected)
    assert bulk.sum_segments(values[:0], items[:0], torch.zeros(2, dtype=torch.int64)).equal(
        torch.zeros(2, 40, dtype=dtype)
    )


# -- where runs use it -------------------------------------------------------------------------------------------------


def test_a_model_is_clipped_in_one_launch(bulk, monkeypatch):
    found = []
    for each in (TORCH, bulk):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        config = ClipConfig(mode="cmsa", alpha=0.1, mpus={"0.*": "first", "1.*": "second"})
        clipper = CMSAClipper.for_model(model, base=0.01, config=config)
        clipper.bulk = each
        launched = counted(monkeypatch, "scale_groups")
        model(torch.randn(4, 8)).square().sum().backward()
        clipper.clip(model.named_parameters())
        found.append([p.grad for p in model.parameters()])
        assert launched == ([] if each is TORCH else [2]), "two modules"
    assert all(map(torch.equal, *found))


def test_all_gradients_of_a_module_are_scaled_in_one_launch(bulk, monkeypatch):
    found, launched = [], counted(monkeypatch, "scale_groups")
    for each in (TORCH, bulk):
        torch.manual_seed(1)
        experts = small_experts()
        experts.manager.bulk = each
        experts(torch.randn(9, 24), (4, 0, 3, 2)).sum().backward()
        gradients = ExpertGradients([experts])
        gradients.finish()
        gradients.scale(0.3)
        found.append([page.clone() for _, page in gradients.pages(experts)])
        assert gradients.squares(PageShards()) > 0
    assert len(launched) == 1
    assert all(map(torch.equal, *found))


def test_tiers_with_kernels_change_no_bit(tmp_path, monkeypatch):
    """Disk and host memory behind streams that are late, pages sealed on the device, small ones gathered."""
    task = Task(modules=1, experts=6, active=4, steps=2, dtype=torch.bfloat16, clip=0.0)
    expected = train(task)
    for name in ("copy_pages", "page_checksums"):
        launched = counted(monkeypatch, name)
    monkeypatch.setattr(managers, "bulk_for", lambda device: KernelBulk())
    options = PagingOptions(Budget(fraction=0.3), Budget(fraction=0.2), tmp_path, checksum="crc32")
    copier = StreamCopier(LateStreams(1), KernelBulk())
    found = train(task, options, mover=ManualMover(1), copier=copier, check=True)
    assert not found.differs_from(expected)
    assert len(launched) > 10, "pages that went to disk, and came back"


def test_small_pages_that_lie_together_in_host_memory_alone_are_one_copy(bulk):
    device, host = torch.zeros(40, 64), torch.arange(64.0 * 2 * FEWEST).view(-1, 64)
    places = torch.randperm(40)[: len(host)].tolist()
    moved, copy = list[int](), bulk.copy

    def counting(pairs):
        moved.append(len(pairs))
        copy(pairs)

    bulk.copy = counting
    copier = StreamCopier(LateStreams(), bulk)
    copier.load([(row, device[place]) for row, place in zip(host, places, strict=True)])
    copier.settle()
    assert torch.equal(device[places], host)
    back = torch.zeros_like(host)
    copier.save([(device[place], row) for row, place in zip(back, places, strict=True)])
    assert torch.equal(back, host)
    assert moved == [len(host)] * 2, "each way one gather or scatter, and one copy over the link"
    few = [torch.zeros(64) for _ in range(FEWEST)]
    copier.load(list(zip(host, few, strict=False)))
    copier.settle()
    assert len(moved) == 3
    assert all(map(torch.equal, few, host))


def test_what_comes_back_from_disk_is_what_left_the_device(tmp_path, bulk, monkeypatch):
    disk, copier = DiskFile(tmp_path, checksum="crc32"), StreamCopier(LateStreams(), bulk)
    offset, (slot, other) = disk.reserve(4096), aligned_empty((2, 1024), dtype=torch.float32)
    slot.copy_(torch.randn(1024))
    copier.to_disk(disk, offset, slot, name=lambda: "page")
    copier.from_disk(disk, offset, other, name=lambda: "page")
    assert torch.equal(slot, other)
    read = disk.read

    def damaged(offset, target, *, name):
        read(offset, target, name=name)
        target[7] += 1.0  # between the disk's own checksum and the device

    monkeypatch.setattr(disk, "read", damaged)
    with pytest.raises(PageIoError, match="reading the page failed: its checksum on the device is not the one"):
        copier.from_disk(disk, offset, other, name=lambda: "page")
    disk.write(offset, other, name=lambda: "page")  # from host memory: other bytes, and nothing said of them
    copier.from_disk(disk, offset, slot, name=lambda: "page")
    disk.close()


def test_a_copy_for_a_checkpoint_is_compared_with_the_page(tmp_path, bulk, monkeypatch):
    monkeypatch.setattr(managers, "bulk_for", lambda device: bulk)
    pages = Pages(tmp_path, experts=2, slots=2)
    assert float(pages.manager.page_copy(pages.id(1))[0]) == 1.0
    monkeypatch.setattr(readers, "word_sums", lambda page: (0, 0))
    with pytest.raises(
        PageIoError, match=r"copying the weight page of experts, expert 1, slice 0 from the device failed"
    ):
        pages.manager.page_copy(pages.id(1))


def test_a_checksum_is_taken_on_the_device_that_has_the_page_whatever_thread_asks(tmp_path, bulk, monkeypatch):
    current, launched = [0], list[int]()  # a new thread begins with the first device

    @contextmanager
    def second(device):
        assert device == torch.device("cuda:1")
        current[0] = 1
        yield
        current[0] = 0

    monkeypatch.setattr(torch.cuda, "device", second)
    with readers.launching_on(torch.device("cuda:1")):
        assert current == [1]
    with readers.launching_on(CPU):
        assert current == [0]
    plain = bulk.checksums

    def checksums(pages):
        launched.append(current[0])
        return plain(pages)

    monkeypatch.setattr(bulk, "checksums", checksums)
    monkeypatch.setattr(readers, "launching_on", lambda device: second(torch.device("cuda:1")))
    monkeypatch.setattr(managers, "bulk_for", lambda device: bulk)
    Pages(tmp_path, experts=1, slots=1).manager.page_copy(0)
    assert launched == [1]


def test_pages_that_compaction_moves_are_copied_together(tmp_path, bulk, monkeypatch):
    monkeypatch.setattr(managers, "bulk_for", lambda device: bulk)
    monkeypatch.setattr("megascale_omni.paging.tiers.SEGMENT_BYTES", 4 * 4096)
    launched = counted(monkeypatch, "copy_pages")
    pages = Pages(tmp_path, experts=16, slots=16)
    pages.send_away(*range(0, 16, 2))
    pages.manager.compact()
    moved = pages.counts["pages_moved"]
    assert moved == 8
    assert launched == [4], "those at the ends of chains are one or two, and copied one by one"
    pages.check()


def test_gradients_of_pages_that_are_stepped_together_are_clipped_in_one_launch(bulk, monkeypatch):
    launched, experts, seen = counted(monkeypatch, "scale_groups"), small_experts(), list[torch.Tensor]()
    experts.manager.bulk = bulk
    arithmetic = SimpleNamespace(
        steps_together=lambda device: True,
        advance_all=lambda segments, *, clip, stop, due: seen.extend(segment.g for segment in segments),
    )
    together = Together.of(experts, arithmetic, clip=0.37)  # type: ignore[arg-type]
    assert together is not None
    given = [torch.randn(100) for _ in range(3)]
    expected = [gradient * 0.37 for gradient in given]
    for expert, gradient in enumerate(given):
        pages = {Plane.WEIGHT: torch.zeros(100), Plane.GRADIENT: gradient}
        together.add((expert, 0), pages, [(slice(0, 60), ()), (slice(60, 100), ())], step=1)
    together.launch()
    assert launched == [1], "one group of three"
    assert all(map(torch.equal, (torch.cat(seen[n : n + 2]) for n in (0, 2, 4)), expected))
