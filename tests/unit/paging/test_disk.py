"""The scratch file: nameless, direct, whole or an error that names the page; never bytes that were not written."""

import errno
import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch

from megascale_omni.paging.disk import DiskFile, PageIoError
from megascale_omni.paging.layout import SLOT_ALIGNMENT, SlotClass
from megascale_omni.paging.tiers import Arena

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


def flip_bit(disk: DiskFile, position: int) -> None:
    """Changes one bit of the file, in a block of memory that direct io takes."""
    block, start = mmap.mmap(-1, SLOT_ALIGNMENT), position - position % SLOT_ALIGNMENT
    os.preadv(disk._fd, [block], start)
    block[position - start] ^= 4
    os.pwritev(disk._fd, [block], start)


@pytest.fixture
def disk(tmp_path):
    file = DiskFile(tmp_path, checksum="crc32")
    yield file
    file.close()


def test_every_slot_comes_back_from_its_place(disk):
    written = slots(8)
    first = disk.reserve(4 * SLOT.nbytes)
    second = disk.reserve(4 * SLOT.nbytes)
    assert (first, second, disk.size) == (0, 4 * SLOT.nbytes, 8 * SLOT.nbytes)
    order = torch.randperm(8).tolist()
    for i in order:
        disk.write(i * SLOT.nbytes, written[i], name=name)
    (target,) = slots(1)
    for i in reversed(order):
        disk.read(i * SLOT.nbytes, target, name=name)
        assert target.equal(written[i])
    assert (disk.bytes_read, disk.bytes_written) == (8 * SLOT.nbytes, 8 * SLOT.nbytes)


def test_a_slot_written_again_comes_back_as_written_last(disk):
    old, new, target = slots(3)
    disk.reserve(SLOT.nbytes)
    disk.write(0, old, name=name)
    disk.write(0, new, name=name)
    disk.read(0, target, name=name)
    assert target.equal(new)


def test_bf16_slots_and_not_a_number_are_bytes_like_any_other(disk):
    slot_class = SlotClass(torch.bfloat16, 2048)
    arena = Arena(device=torch.device("cpu"), poison=True)
    source, target = (arena.tensor(slot_class, arena.allocate(slot_class)) for _ in range(2))
    target.zero_()
    disk.reserve(slot_class.nbytes)
    disk.write(0, source, name=name)
    disk.read(0, target, name=name)
    assert target.view(torch.int16).equal(source.view(torch.int16))


def test_io_is_direct_where_the_file_system_can(disk, tmp_path):
    """The page cache would grow by the whole state."""
    try:
        probe = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        assert not disk.direct
        return
    os.close(probe)
    assert disk.direct


# -- the file has no name ----------------------------------------------------------------------------------------------


def test_nothing_lies_in_the_folder_and_room_is_taken_at_once_and_given_back(tmp_path):
    disk = DiskFile(tmp_path)
    disk.reserve(8 << 20)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(disk._fd).st_blocks * 512 >= 8 << 20
    assert os.fstat(disk._fd).st_nlink == 0
    descriptor = disk._fd
    disk.close()
    disk.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_nobody_keeps_is_closed(tmp_path):
    disk = DiskFile(tmp_path)
    descriptor = disk._fd
    del disk
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_without_nameless_files_one_is_made_and_unlinked_at_once(tmp_path, monkeypatch):
    real = os.open

    def old_file_system(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", old_file_system)
    disk = DiskFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    source, target = slots(2)
    disk.reserve(SLOT.nbytes)
    disk.write(0, source, name=name)
    disk.read(0, target, name=name)
    assert target.equal(source)
    disk.close()


def test_without_direct_io_the_page_cache_serves(tmp_path, monkeypatch):
    real = os.open

    def cached_only(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", cached_only)
    disk = DiskFile(tmp_path)
    assert not disk.direct
    assert list(tmp_path.iterdir()) == []
    disk.close()


def test_a_process_killed_in_the_middle_of_a_write_leaves_nothing(tmp_path):
    code = f"""
import os, signal
import torch
from megascale_omni.paging import disk as module
from tests.unit.paging.test_disk import SLOT, name, slots
real = os.pwritev
def half(fd, buffers, offset):
    real(fd, [buffers[0][:4096]], offset)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwritev = half
file = module.DiskFile({str(tmp_path)!r})
file.reserve(1 << 20)
file.write(0, slots(1)[0], name=name)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (-9, "")
    assert list(tmp_path.iterdir()) == []


# -- less than was asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [4096, 5000, 8191, 12287])
def test_calls_that_do_less_than_they_were_asked_for_are_repeated(tmp_path, monkeypatch, most, direct):
    disk = DiskFile(tmp_path, checksum="crc32")
    disk.direct = disk.direct and direct
    if not direct:
        monkeypatch.setattr(disk, "_fd", os.open(tmp_path / "cached", os.O_RDWR | os.O_CREAT))
    reads, writes, counts = os.preadv, os.pwritev, []

    def shorter(call):
        def run(fd, buffers, offset):
            wanted = memoryview(buffers[0])
            if disk.direct and most % SLOT_ALIGNMENT and len(wanted) > most:
                # Direct io moves whole blocks; what it reports may be less.
                call(fd, [buffers[0][: most - most % SLOT_ALIGNMENT + SLOT_ALIGNMENT]], offset)
                counts.append(most)
                return most
            counts.append(call(fd, [buffers[0][:most]], offset))
            return counts[-1]

        return run

    monkeypatch.setattr(os, "preadv", shorter(reads))
    monkeypatch.setattr(os, "pwritev", shorter(writes))
    source, target = slots(2)
    disk.reserve(SLOT.nbytes)
    disk.write(0, source, name=name)
    disk.read(0, target, name=name)
    assert target.equal(source)
    assert len(counts) >= 4
    disk.close()


@pytest.mark.parametrize("count", [0, 100])
def test_direct_io_that_does_not_get_on_is_an_error_and_no_endless_loop(tmp_path, monkeypatch, count):
    disk = DiskFile(tmp_path)
    disk.direct = True
    disk.reserve(SLOT.nbytes)
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: count)
    with pytest.raises(PageIoError, match=f"writing the {NAME} failed: it ended after 0 of 12288 bytes"):
        disk.write(0, slots(1)[0], name=name)
    disk.close()


def test_a_truncated_file_is_named(disk):
    (source,) = slots(1)
    disk.reserve(2 * SLOT.nbytes)
    disk.write(SLOT.nbytes, source, name=name)
    os.ftruncate(disk._fd, SLOT.nbytes + SLOT_ALIGNMENT)
    with pytest.raises(PageIoError, match=f"reading the {NAME} failed: it ended after 4096 of 12288 bytes"):
        disk.read(SLOT.nbytes, source, name=name)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"), [(errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left on device")]
)
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_errors_of_the_system_name_the_page(disk, monkeypatch, call, code, said):
    (slot,) = slots(1)
    disk.reserve(SLOT.nbytes)
    disk.write(0, slot, name=name)

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    verb, act = ("reading", disk.read) if call == "preadv" else ("writing", disk.write)
    with pytest.raises(PageIoError, match=f"{verb} the {NAME} failed: {said}") as caught:
        act(0, slot, name=name)
    assert caught.value.errno == code


@pytest.mark.parametrize("checksum", ["crc32", "xxh3"])
@pytest.mark.parametrize("position", [0, 5000, 11999, 12287])
def test_a_flipped_bit_is_found_anywhere_in_the_slot(tmp_path, checksum, position):
    if checksum == "xxh3":
        pytest.importorskip("xxhash")
    disk = DiskFile(tmp_path, checksum=checksum)
    source, target = slots(2)
    disk.reserve(2 * SLOT.nbytes)
    for offset in (0, SLOT.nbytes):
        disk.write(offset, source, name=name)
    flip_bit(disk, SLOT.nbytes + position)
    message = f"reading the {NAME} failed: its {checksum} checksum does not match what was written"
    for _ in range(2):
        with pytest.raises(PageIoError, match=message):
            disk.read(SLOT.nbytes, target, name=name)
    disk.read(0, target, name=name)
    flip_bit(disk, SLOT.nbytes + position)
    disk.read(SLOT.nbytes, target, name=name)
    assert target.equal(source)
    disk.close()


def test_a_write_that_the_disk_forgot_is_found(disk, monkeypatch):
    old, new, target = slots(3)
    disk.reserve(SLOT.nbytes)
    disk.write(0, old, name=name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, buffers, offset: len(memoryview(buffers[0])))
        disk.write(0, new, name=name)
    with pytest.raises(PageIoError, match="checksum does not match"):
        disk.read(0, target, name=name)


def test_bytes_of_another_page_are_found(disk):
    first, second, target = slots(3)
    disk.reserve(2 * SLOT.nbytes)
    disk.write(0, first, name=name)
    disk.write(SLOT.nbytes, second, name=name)
    os.pwritev(disk._fd, [second.view(torch.uint8).numpy()], 0)  # type: ignore[list-item]
    with pytest.raises(PageIoError, match="checksum does not match"):
        disk.read(0, target, name=name)


def test_without_a_checksum_wrong_bytes_come_back(tmp_path):
    """What the option gives up."""
    disk = DiskFile(tmp_path, checksum="off")
    assert disk.checksum_name == "off"
    source, target = slots(2)
    disk.reserve(SLOT.nbytes)
    disk.write(0, source, name=name)
    flip_bit(disk, 20)
    disk.read(0, target, name=name)
    assert not target.equal(source)
    disk.close()


def test_a_page_that_was_never_written_is_not_read(disk):
    disk.reserve(SLOT.nbytes)
    with pytest.raises(RuntimeError, match=f"the {NAME} is read from disk, but was never written there"):
        disk.read(0, slots(1)[0], name=name)


def test_the_best_checksum_that_is_installed_is_taken(tmp_path, monkeypatch):
    for installed, expected in ((True, "xxh3"), (False, "crc32")):
        if installed:
            pytest.importorskip("xxhash")
        else:
            monkeypatch.setitem(sys.modules, "xxhash", None)
        disk = DiskFile(tmp_path)
        assert disk.checksum_name == expected
        disk.close()
    with pytest.raises(ImportError, match=r"page checksum 'xxh3' needs xxhash: pip install 'megascale\[paging\]'"):
        DiskFile(tmp_path, checksum="xxh3")
    with pytest.raises(ValueError, match="page checksum 'md5' is unknown; choose one of auto, xxh3, crc32, off"):
        DiskFile(tmp_path, checksum="md5")  # type: ignore[arg-type]
