"""Saving beside training: what a save must still read is copied, or waited for, before training changes it.

[Note: copy before write]
A save sees every byte as it was when it was asked for, without a second copy of the state: the writer reads tensors
where they are, in the order of the file, and whoever is about to change a chunk that is not written yet says so first.
Then the chunk is copied (*staged*), as long as the copies stay below ``limit`` bytes; beyond that the trainer waits for
the writer, which never waits for the trainer. Optimizer steps walk pages in the order in which they are written, so
that few chunks are in question.

    PENDING -> WRITING -> DONE         read in place by the writer
    PENDING -> STAGED  -> WRITING -> DONE    copied first

A chunk whose bytes may move meanwhile is copied by the writer, when its turn has come, and is DONE with that.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from megascale_omni.checkpoint.digests import Data

WAIT_SECONDS = 300.0
"""Longest wait for the writer; a disk that is slower than this is taken for dead."""


class ChunkState(enum.Enum):
    """Where a chunk's bytes are; see [Note: copy before write]."""

    PENDING = "pending"
    STAGED = "staged"
    WRITING = "writing"
    DONE = "done"


class Register(Protocol):
    """How a save is told of bytes: what they change with, what reads them, how many they are.

    ``copies``: ``read`` makes a copy. The writer calls the result when it writes them.
    """

    def __call__(
        self, key: object, read: Callable[[], Data], nbytes: int, *, copies: bool = False
    ) -> Callable[[], Data]: ...


@dataclass
class _Chunk:
    read: Callable[[], Data]
    nbytes: int
    copies: bool = False
    state: ChunkState = ChunkState.PENDING
    staged: bytes | None = None


class Snapshot:
    """The chunks of one save; copies of them take ``limit_bytes`` at most.

    Attributes: ``stall_seconds`` that the trainer has spent here, ``peak_staged_bytes`` of copies.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.stall_seconds = 0.0
        self.peak_staged_bytes = 0
        self._chunks: dict[object, list[_Chunk]] = {}
        self._staged_bytes = 0
        self._current: list[_Chunk] = []
        self._ended = False
        self._changed = threading.Condition()

    def register(
        self, key: object, read: Callable[[], Data], nbytes: int, *, copies: bool = False
    ) -> Callable[[], Data]:
        """Adds a chunk; see :class:`Register`."""
        chunk = _Chunk(read, nbytes, copies)
        self._chunks.setdefault(key, []).append(chunk)
        return lambda: self._take(chunk)

    # -- the writer ----------------------------------------------------------------------------------------------------

    def _take(self, chunk: _Chunk) -> Data:
        """The chunk's bytes, which the trainer leaves alone until the writer releases them."""
        with self._changed:
            chunk.state = ChunkState.WRITING
            if chunk.staged is not None or not chunk.copies:
                self._current.append(chunk)
                if chunk.staged is not None:
                    return chunk.staged
        data = chunk.read()
        if chunk.copies:
            with self._changed:
                chunk.state = ChunkState.DONE
                self._changed.notify_all()
        return data

    def release(self) -> None:
        """What was taken so far has been written."""
        with self._changed:
            self._finish_current()

    def end(self) -> None:
        """Nobody reads any more, whether everything was written or not."""
        with self._changed:
            self._finish_current()
            self._ended = True
            self._changed.notify_all()

    def _finish_current(self) -> None:
        for chunk in self._current:
            chunk.state = ChunkState.DONE
            if chunk.staged is not None:
                self._staged_bytes -= chunk.nbytes
                chunk.staged = None
        self._current.clear()
        self._changed.notify_all()

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def before_write(self, keys: Iterable[object]) -> None:
        """To be called before what belongs to ``keys`` changes; returns when it may.

        Raises:
            RuntimeError: the writer has stood still for too long.
        """
        if self._ended:
            return
        waiting = [c for key in keys for c in self._chunks.get(key, ()) if c.state is not ChunkState.DONE]
        if waiting:
            start = time.perf_counter()
            for chunk in waiting:
                self._save_from_change(chunk)
            self.stall_seconds += time.perf_counter() - start

    def _save_from_change(self, chunk: _Chunk) -> None:
        """Copies a chunk, or waits until it is written."""

        def settled() -> bool:
            return self._ended or chunk.state is ChunkState.DONE or chunk.staged is not None

        def room() -> bool:
            return chunk.state is ChunkState.PENDING and self._staged_bytes + chunk.nbytes <= self.limit_bytes

        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: settled() or room(), timeout=WAIT_SECONDS):
                    raise RuntimeError(f"a checkpoint's writer has written nothing for {WAIT_SECONDS:g} s")
                if settled():
                    return
            # The writer may read it at the same time: nobody changes it meanwhile, this is the thread that would.
            data = bytes(chunk.read())
            with self._changed:
                if chunk.state is ChunkState.PENDING:
                    chunk.staged, chunk.state = data, ChunkState.STAGED
                    self._staged_bytes += chunk.nbytes
                    self.peak_staged_bytes = max(self.peak_staged_bytes, self._staged_bytes)


def in_order(key: object, read: Callable[[], Data], nbytes: int, *, copies: bool = False) -> Callable[[], Data]:
    """For saves during which nothing changes: chunks are read when they are written."""
    return read
