"""Folders and file systems for the scratch file: what cannot hold it is refused before training, with the numbers."""

import errno
import logging
import os
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from megascale_omni.paging import disk as module
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.disk import DiskFile, file_system_of
from megascale_omni.paging.layout import SlotClass
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.tiers import Arena
from scripts.measurements.paging_model import Model, Task, Trained, batches_of, train

SLOT = SlotClass(torch.float32, 3000)  # 12 KiB: three blocks
NAME = "weight page of layer, expert 3, slice 1"


def slots(count: int) -> list[torch.Tensor]:
    """Aligned slots with random contents."""
    arena = Arena(device=torch.device("cpu"))
    found = [arena.tensor(SLOT, arena.allocate(SLOT)) for _ in range(count)]
    for slot in found:
        slot.copy_(torch.randn_like(slot))
    return found


def name() -> str:
    return NAME


@pytest.fixture
def disk(tmp_path):
    file = DiskFile(tmp_path, checksum="crc32")
    yield file
    file.close()


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_or_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "missing", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"is not a folder; create it, or give another --megascale-disk-path"):
            DiskFile(wrong)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not write")
def test_a_folder_that_cannot_be_written_or_reached_is_refused(tmp_path):
    """As somebody who may not."""
    hidden, read_only = tmp_path / "hidden", tmp_path / "read-only"
    (hidden / "inside").mkdir(parents=True)
    hidden.chmod(0o700)
    read_only.mkdir(mode=0o555)
    opened = [folder for folder in (tmp_path, *tmp_path.parents) if folder.stat().st_mode & 0o005 != 0o005]
    modes = [folder.stat().st_mode for folder in opened]
    for folder in opened:
        folder.chmod(0o755)
    try:
        os.seteuid(65534)
        for folder, message in ((read_only, "cannot be written: Permission denied"), (hidden / "inside", "Permission")):
            with pytest.raises(ValueError, match=rf"disk path .*{message}.* give another --megascale-disk-path"):
                DiskFile(folder)
    finally:
        os.seteuid(0)
        for folder, mode in zip(opened, modes, strict=True):
            folder.chmod(mode)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC])
def test_a_read_only_or_full_file_system_is_refused(tmp_path, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=f"cannot be written: {os.strerror(code)}; give another --megascale-disk-path"):
        DiskFile(tmp_path)


def test_no_descriptor_left_is_refused_too(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match="cannot be written: Too many open files"):
        DiskFile(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_files_is_named(disk, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT.nbytes, hard))
    try:
        with pytest.raises(
            ValueError, match=rf"may have {SLOT.nbytes} \(RLIMIT_FSIZE\); raise that limit \(ulimit -f\)"
        ):
            disk.reserve(2 * SLOT.nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk.reserve(2 * SLOT.nbytes) == 0


def test_more_than_the_disk_has_is_refused_with_the_numbers(disk, tmp_path):
    disk.reserve(SLOT.nbytes)
    free = os.statvfs(tmp_path)
    wanted = free.f_blocks * free.f_frsize  # all of the disk, of which some is used
    message = (
        f"disk path {tmp_path} has no room for the experts' pages: {wanted + SLOT.nbytes} bytes are needed, "
        r"\d+ are free \(No space left on device\); free some, or give another --megascale-disk-path"
    )
    with pytest.raises(ValueError, match=message):
        disk.reserve(wanted)
    assert disk.size == SLOT.nbytes
    (slot,) = slots(1)
    disk.write(0, slot, name=name)


def test_a_disk_that_is_filled_meanwhile_gives_back_what_it_could_not_complete(disk, monkeypatch):
    real = os.posix_fallocate

    def half(fd, offset, nbytes):
        real(fd, offset, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.reserve(SLOT.nbytes)
    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(ValueError, match="has no room"):
        disk.reserve(1 << 20)
    assert os.fstat(disk._fd).st_size == SLOT.nbytes


def test_what_was_promised_stays_promised_where_the_disk_has_no_room_for_it_yet(disk, monkeypatch):
    """Pages know their places: nobody else gets them, and they are taken when there is room."""
    first = disk.promise(SLOT.nbytes)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ValueError, match="has no room"):
            disk.fill()
        with pytest.raises(ValueError, match="has no room"):
            disk.reserve(SLOT.nbytes)
    assert disk.promise(SLOT.nbytes) == first + SLOT.nbytes
    disk.fill()
    assert os.fstat(disk._fd).st_size == 2 * SLOT.nbytes


def test_a_file_system_that_cannot_hold_the_file_is_not_said_to_be_full(disk, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ValueError, match=r"cannot hold the experts' pages: .*Operation not supported"):
        disk.reserve(SLOT.nbytes)


def test_memory_that_poses_as_a_disk_is_warned_of(caplog):
    shared_memory = Path("/dev/shm")
    if file_system_of(shared_memory) not in module.MEMORY_FILE_SYSTEMS:
        pytest.skip("/dev/shm is no file system in memory here")
    with caplog.at_level(logging.WARNING):
        disk = DiskFile(shared_memory)
    disk.close()
    assert "disk path /dev/shm is on tmpfs, which is memory: pages put there free no memory" in caplog.text


def test_a_real_disk_is_not_warned_of(tmp_path, caplog):
    if file_system_of(tmp_path) in module.MEMORY_FILE_SYSTEMS:
        pytest.skip("temporary files are in memory here")
    with caplog.at_level(logging.WARNING):
        DiskFile(tmp_path).close()
    assert caplog.text == ""


def test_the_file_system_is_that_of_the_longest_mount_point(monkeypatch):
    table = "\n".join(
        [
            "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw",
            "23 22 0:20 / /data rw - xfs /dev/sdb rw",
            "24 23 0:21 / /data/with\\040space rw - tmpfs tmpfs rw",
            "25 22 0:22 / /données rw - btrfs /dev/sdc rw",
        ]
    )
    monkeypatch.setattr(Path, "read_text", lambda self, *args: table)
    monkeypatch.setattr(Path, "resolve", lambda self: self)
    found = {
        folder: file_system_of(Path(folder))
        for folder in ("/home", "/data", "/database", "/data/x", "/data/with space/x", "/données/y")
    }
    assert found == {
        "/home": "ext4",
        "/data": "xfs",
        "/database": "ext4",
        "/data/x": "xfs",
        "/data/with space/x": "tmpfs",
        "/données/y": "btrfs",
    }


def test_where_the_system_does_not_say_the_file_system_is_unknown(monkeypatch, tmp_path):
    def refuse(self, *args):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert file_system_of(tmp_path) == "unknown"


def test_where_memory_holds_every_page_the_disk_need_not(tmp_path):
    """The file is as long as all pages, and has no blocks until memory becomes less."""
    task = Task(modules=1, experts=6, active=4, steps=2)
    with batches_of(task):
        model = Model(task, PagingOptions(Budget(fraction=0.5), Budget(fraction=0.5), tmp_path, checksum="crc32"))
    disk, found = model.manager.pager.tiers.disk, Trained()
    assert disk is not None
    with batches_of(task):
        model.step(1, found)
        assert disk.size > 0
        assert os.fstat(disk._fd).st_blocks * 512 < disk.size / 4, "classes are rounded to slots, one or two a class"
        with mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "full")):
            with pytest.raises(ValueError, match="has no room for the experts' pages"):
                model.manager.resize(Budget(fraction=0.3))
            assert model.manager.options.device_budget == Budget(fraction=0.5), "as it was"
        model.manager.resize(Budget(fraction=0.3))
        assert os.fstat(disk._fd).st_blocks * 512 >= disk.size
        model.step(2, found)
        model.export(found)
    model.manager.close()
    assert not found.differs_from(train(task))
