"""Dense tensors in files: zeros at first, what was written afterwards, nothing left behind, little memory."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from megascale_omni.checkpoint.scratch import DenseScratch, in_memory

SHAPES = {"one": (3, 5), "none": (0, 4), "two": (7,), "scalar": ()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_are_those_of_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    made, reference = DenseScratch(tmp_path / "new folder")(SHAPES, dtype), in_memory(SHAPES, dtype)
    assert made.keys() == reference.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, reference[name])
        assert tensor.dtype is dtype
        assert tensor.shape == reference[name].shape


def test_what_is_written_stays_when_its_memory_is_given_back(tmp_path: Path) -> None:
    scratch = DenseScratch(tmp_path)
    made = scratch({"big": (1 << 18,), "other": (5,)}, torch.float32)
    made["big"].copy_(torch.arange(1 << 18))
    made["other"].fill_(7)
    scratch.settle()
    scratch.settle()  # nothing is left to do
    assert torch.equal(made["big"], torch.arange(1 << 18, dtype=torch.float32))
    assert made["other"].tolist() == [7.0] * 5
    assert os.listdir(tmp_path) == [], "files have no name"


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def full(fd: int, offset: int, nbytes: int) -> None:
        calls.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"needs 64 bytes of scratch space.*No space left.*free some"):
        DenseScratch(tmp_path)({"a": (3,)}, torch.float32)
    assert len(calls) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(calls[0])


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "file"))):
        DenseScratch(tmp_path / "file")({"a": (3,)}, torch.float32)


def private_bytes() -> int:
    """Memory that is neither a file's nor shared."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024  # type: ignore[index]


def test_a_model_of_many_modules_takes_no_private_memory(tmp_path: Path) -> None:
    scratch = DenseScratch(tmp_path)
    before = private_bytes()
    kept = []
    for number in range(16):  # 64 MiB
        kept.append(scratch({"a": (1 << 20,)}, torch.float32)["a"].fill_(number))
        scratch.settle()
    assert private_bytes() - before < 8 << 20
    assert [int(tensor[-1]) for tensor in kept] == list(range(16))
