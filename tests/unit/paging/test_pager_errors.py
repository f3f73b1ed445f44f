"""What goes wrong with a page is named, harms no other, and is kept from nobody; and how paging ends.

Jobs are made one by one, so that every order of events is the one that a test means.
"""

import logging
import os
from pathlib import Path

import pytest
import torch

from megascale_omni.paging.disk import PageIoError
from megascale_omni.paging.mover import MoverStalled
from megascale_omni.paging.planes import Plane
from megascale_omni.paging.tiers import TierKind
from tests.unit.paging.small import Pages, one_page_a_batch, resident  # noqa: F401 - a fixture

# -- errors ------------------------------------------------------------------------------------------------------------


def break_page(pages: Pages, expert: int) -> None:
    """Changes a byte of a page in the file."""
    disk = pages.manager.pager.tiers.disk
    assert disk is not None
    with open(f"/proc/self/fd/{disk._fd}", "r+b", buffering=0) as file:
        offset = int(pages.manager.table.disk_offset[pages.id(expert)])
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())


def test_an_error_of_a_prefetch_that_nobody_waits_for_comes_up_at_the_next_visit(tmp_path):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(0)
    break_page(pages, 0)
    pages.manager.pager.prefetch([pages.id(0)])
    pages.jobs.complete()
    with pytest.raises(PageIoError, match="reading the weight page of experts, expert 0, slice 0 failed: its crc32"):
        list(pages.manager.waves(pages.module, [1], planes=[Plane.WEIGHT]))
    pages.manager.check_integrity()
    assert pages.used == 2  # the slot it should have got is free again


def test_what_ended_beside_a_job_that_failed_is_taken_back_although_no_other_ends(tmp_path):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(0, 1)
    break_page(pages, 0)
    pager = pages.manager.pager
    pager.prefetch([pages.id(0), pages.id(1)])
    pages.jobs.complete_all()
    with pytest.raises(PageIoError, match="expert 0, slice 0"):
        pager.poll()
    assert pager.flights
    pager.poll()
    assert not pager.flights
    assert pages.tier(1) == "active"


def test_wrong_bytes_are_never_handed_out_however_often_they_are_asked_for(tmp_path):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(0)
    break_page(pages, 0)
    for _ in range(3):
        with pytest.raises(PageIoError, match="expert 0, slice 0"):
            pages.manager.lease(pages.module, Plane.WEIGHT, [0])
        pages.manager.check_integrity()
        assert (pages.tier(0), pages.used) == ("evicted", 2)
    break_page(pages, 0)  # the bit flips back
    pages.check()


def test_a_page_that_could_not_be_saved_stays_whole_and_unsaved(tmp_path, monkeypatch):
    pages = Pages(tmp_path, experts=3)

    def refuse(fd: int, buffers: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        pages.manager.pager.departures.evict(pages.id(1))
        pages.jobs.complete()
        with pytest.raises(PageIoError, match="writing the weight page of experts, expert 1, slice 0 failed: No space"):
            pages.manager.pager.poll()
    pages.manager.check_integrity()
    assert pages.tier(1) == "active"
    assert pages.manager.table.dirty[pages.id(1)]
    pages.check()


def test_whatever_goes_wrong_in_an_io_thread_names_the_page(tmp_path, monkeypatch):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(2)

    def fail(fd: int, buffers: object, offset: int) -> int:
        raise SystemExit("killed")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(RuntimeError, match=r"loading the weight page of experts, expert 2, slice 0 failed: SystemExit"):
        pages.read(2)
    pages.manager.check_integrity()


def test_a_job_that_never_ends_is_an_error_that_names_what_was_waited_for(tmp_path):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(2)
    pages.manager.pager.prefetch([pages.id(2)])
    pages.jobs.pending.clear()  # the thread is gone
    with pytest.raises(MoverStalled, match="loading the weight page of experts, expert 2, slice 0"):
        pages.read(2)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_twice_is_closing_once_and_pages_cannot_be_moved_any_more(tmp_path):
    pages = Pages(tmp_path)
    pages.manager.pager.departures.evict(pages.id(resident(pages)[0]))
    for _ in range(2):
        pages.manager.close()
    away = next(e for e in range(6) if pages.tier(e) == "evicted")
    with pytest.raises((RuntimeError, OSError)):
        pages.read(away)
    disk = pages.manager.pager.tiers.disk
    assert disk is not None
    assert disk._fd == -1


def test_an_error_that_nobody_saw_is_logged_when_pages_are_closed(tmp_path, caplog):
    pages = Pages(tmp_path, experts=3)
    pages.send_away(0)
    break_page(pages, 0)
    pages.manager.pager.prefetch([pages.id(0)])
    pages.jobs.complete()
    with caplog.at_level(logging.ERROR):
        pages.manager.close()
    assert "loading the weight page of experts, expert 0, slice 0 failed" in caplog.text
    assert "checksum" in caplog.text


def test_the_scratch_file_stays_open_while_an_io_thread_still_uses_it(tmp_path, monkeypatch, caplog):
    pages = Pages(tmp_path)
    monkeypatch.setattr(pages.mover, "close", lambda: False)
    with caplog.at_level(logging.ERROR):
        pages.manager.close()
    assert "an io thread does not end" in caplog.text
    disk = pages.manager.pager.tiers.disk
    assert disk is not None
    assert disk._fd >= 0
    disk.close()


def test_nothing_lies_in_the_folder(tmp_path: Path):
    pages = Pages(tmp_path)
    assert list(tmp_path.iterdir()) == []
    pages.manager.close()
    assert list(tmp_path.iterdir()) == []


def test_without_a_disk_nothing_leaves(tmp_path):
    from megascale_omni.paging.manager import ExpertManager

    manager = ExpertManager(device=torch.device("cpu"))
    assert manager.pager.tiers.mover is None
    assert not manager.pager.can_evict
    manager.check_budget()
    manager.close()
    assert TierKind.DISK not in manager.table.tier
