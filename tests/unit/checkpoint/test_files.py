"""Files hold the bytes they were given, wherever these lie in memory and however the system writes them."""

import errno
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from megascale_omni.checkpoint import filesystem
from megascale_omni.checkpoint.filesystem import BLOCK_BYTES, LocalFile, write_file


def placed(size: int, offset: int, chance: np.random.Generator) -> np.ndarray:
    """Random bytes that begin ``offset`` bytes behind a block."""
    raw = np.empty(size + 2 * BLOCK_BYTES, np.uint8)
    start = -filesystem._address(raw) % BLOCK_BYTES + offset
    part = raw[start : start + size]
    part[:] = chance.integers(0, 256, size, dtype=np.uint8)
    return part


SIZES = st.sampled_from([0, 1, 100, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 70_000])
PARTS = st.lists(st.tuples(SIZES, st.sampled_from([0, 0, 64, 1])), max_size=8)


@settings(max_examples=80, deadline=None)
@given(calls=st.lists(PARTS, max_size=4), buffer_blocks=st.integers(1, 8))
def test_bytes_come_back(tmp_path_factory, calls, buffer_blocks):
    path = tmp_path_factory.mktemp("file") / "data"
    chance = np.random.default_rng(1)
    expected = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "_BUFFER_BYTES", buffer_blocks * BLOCK_BYTES)
        file = LocalFile(path)
        for parts in calls:
            arrays = [placed(size, offset, chance) for size, offset in parts]
            expected += b"".join(array.tobytes() for array in arrays)
            file.write(*(array.data for array in arrays))
            for array in arrays:
                array[:] = 0  # the file is done with them
        file.sync()
        file.close()
    assert path.read_bytes() == expected


def test_large_parts_are_not_copied(tmp_path):
    file = LocalFile(tmp_path / "data")
    if not file._direct:
        pytest.skip("this file system has no direct io")
    file.write(b"x" * BLOCK_BYTES, placed(64 * BLOCK_BYTES, 0, np.random.default_rng(1)).data)
    assert file._direct
    assert file._filled == 0
    file.sync()
    file.close()


class System:
    """Writes like the system, but at most ``most`` bytes a call; refuses direct io where ``refuses``."""

    def __init__(self, most: int, refuses: bool = False) -> None:
        self.most, self.refuses, self.calls, self.refused = most, refuses, 0, 0
        self.pwritev = os.pwritev

    def __call__(self, fd, parts, offset):
        import fcntl

        if self.refuses and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self.refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        self.calls += 1
        return self.pwritev(fd, [memoryview(parts[0])[: self.most]], offset)


@pytest.mark.parametrize("system", [System(BLOCK_BYTES), System(BLOCK_BYTES + 512), System(1 << 30, refuses=True)])
def test_short_and_refused_writes_go_on(tmp_path, monkeypatch, system):
    monkeypatch.setattr(os, "pwritev", system)
    data = placed(6 * BLOCK_BYTES + 5, 0, np.random.default_rng(2))
    write_file(filesystem.LocalFileSystem(), tmp_path / "data", data.data)
    assert (tmp_path / "data").read_bytes() == data.tobytes()
    assert system.calls > 1 or system.refused == 1


def test_a_system_that_writes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: 0)
    with pytest.raises(OSError, match="nothing of 5 bytes was written"):
        write_file(filesystem.LocalFileSystem(), tmp_path / "data", b"12345")
