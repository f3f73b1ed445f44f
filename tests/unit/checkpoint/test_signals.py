"""A process told to end (SIGTERM) while it saves: the old checkpoint loads, or the new one, and nothing stays."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from megascale_omni.checkpoint.digests import Data
from megascale_omni.checkpoint.filesystem import LocalFileSystem, OpenFile
from tests.unit.checkpoint.test_atomic import load, save, state

OLD, NEW, NEXT = 3, 9, 10
PAUSE_SECONDS = 60.0
"""Longer than it takes to be ended."""


class StoppingFiles(LocalFileSystem):
    """Real files; before operation number ``stop_at`` it says so and waits to be ended."""

    def __init__(self, stop_at: int, told: int) -> None:
        self._left, self._told = stop_at, told

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.write(self._told, b"!")
            threading.Event().wait(PAUSE_SECONDS)
            os._exit(99)

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def create(self, path: Path) -> OpenFile:
        self._count()
        return _StoppingFile(super().create(path), self)

    def sync_folder(self, path: Path) -> None:
        self._count()
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)


class _StoppingFile:
    def __init__(self, file: OpenFile, files: StoppingFiles) -> None:
        self._file, self._files = file, files

    def write(self, *parts: Data) -> None:
        self._files._count()
        self._file.write(*parts)

    def sync(self) -> None:
        self._files._count()
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def saving(root: Path, stop_at: int, told: int, beside: bool) -> None:
    """What the process does that will be ended."""
    files = StoppingFiles(stop_at, told)
    if not beside:
        save(root, NEW, f"t{NEW}", files)
        return
    checkpoints = Checkpointer(root, files=files, keep=2)
    request = SaveRequest(tag=f"t{NEW}", step=NEW, values={"number": NEW})
    assert checkpoints.save_beside(state(NEW)[0], request) is None
    assert checkpoints.finish() is None
    checkpoints.close()


def ended_in(root: Path, stop_at: int, *, beside: bool) -> bool:
    """Whether a process was ended before operation ``stop_at`` of its save; else it has saved."""
    reading, told = os.pipe()
    process: ForkProcess = multiprocessing.get_context("fork").Process(
        target=saving, args=(root, stop_at, told, beside)
    )
    process.start()
    os.close(told)
    stopped = os.read(reading, 1) == b"!"
    os.close(reading)
    if stopped:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == (-signal.SIGTERM if stopped else 0)
    return stopped


@pytest.mark.parametrize("beside", [False, True])
def test_told_to_end_in_the_middle_of_a_save(tmp_path, beside):
    for number in (1, 2, OLD):
        save(tmp_path / "store", number, f"t{number}")
    found = set()
    for stop_at in itertools.count(1, step=5 if beside else 2):
        root = tmp_path / str(stop_at)
        shutil.copytree(tmp_path / "store", root)
        if not ended_in(root, stop_at, beside=beside):
            break
        found.add(load(root))
        save(root, NEXT, f"t{NEXT}")
        assert load(root) == NEXT
        left = sorted(path.name for path in root.iterdir())
        assert left in (["latest", f"t{NEXT}", f"t{OLD}"], ["latest", f"t{NEXT}", f"t{NEW}"]), "nothing else stays"
    assert stop_at > 25
    assert found == {OLD, NEW}
