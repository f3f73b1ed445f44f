"""Ranks that end together, and say once why: which rank was lost, or which one met an error.

[Note: lost ranks]
A rank that dies leaves its peers an error of the transport that names an address, and only those that were talking to
it. So every rank has a thread that counts up a number of its own in the ranks' store. A rank that ends with an error
says so there first. Whoever meets an error of the transport looks for such words, and where there are none for numbers
that stand still: these ranks were killed, stopped, or cannot be reached. All threads see the first word or verdict, and
end ranks that wait for what will not come.

A launcher that sees a rank gone tells the others to end (SIGTERM) at once. The thread takes this signal, since a rank
that waits in a collective runs no handler: it notes it in the store, so that nobody takes the rank for lost, and ends
the process, after the verdict where one is being found.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BEAT_SECONDS = 0.25
VERDICT_SECONDS = 6 * BEAT_SECONDS
"""How long a number must stand still before its rank is lost."""
GRACE_SECONDS = 5.0
"""How long a rank may take to end by itself after another one has."""
FAILED, TERMINATED = 1, 128 + signal.SIGTERM


@dataclass(frozen=True)
class Word:
    """What the first rank to end by an error says: its rank, exit status, and a line for the others to know it by.

    ``lost``: ranks that it found gone, and nobody need wait for.
    """

    rank: int
    status: int
    message: str
    lost: tuple[int, ...] = ()


def is_transport_error(error: BaseException) -> bool:
    """Whether an error came from talking to another rank, so that its cause is elsewhere."""
    import torch.distributed as dist

    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo/transport", "Connection closed by peer", "NCCL", "ProcessGroup")
    )


def still(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Ranks whose number did not change."""
    return [rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old == new]


def describe_lost(lost: Sequence[int], told: Sequence[int], world: int) -> str:
    """The line for ranks that stand still: ``lost``, or ``told`` by a signal to end; empty where there are none."""
    if lost:
        return f"lost {_named(lost)} of {world}: killed, stopped, or out of reach; the other ranks end"
    return f"{_named(told)} of {world}: told to end (SIGTERM); the other ranks end too" if told else ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Peers:
    """This rank's thread and its words in the store; made once in a process, by its main thread.

    Args:
        store: the ranks' store. rank, world: as usual.
    """

    def __init__(self, store: torch.distributed.Store, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        clone = store.clone  # type: ignore[attr-defined]  # the stubs lack it
        self._main, self._store = clone(), clone()  # a connection that waits holds others up
        self._over, self._judging = threading.Event(), threading.Lock()
        self._word: Word | None = None  # as soon as this rank has read it: the store may be gone later
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._store.set(f"peers/beat/{rank}", "0")
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._beat, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run is over, and no peer is waited for any more."""
        self._over.set()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before)
        self._wakeup.close()
        self._thread.join()
        self._signals.close()

    # --- what the thread does ---------------------------------------------------------------------

    def _beat(self) -> None:
        beat = 0
        while not self._over.is_set():
            ready, _, _ = select.select([self._signals], [], [], BEAT_SECONDS)
            if ready and signal.SIGTERM in self._signals.recv(64):
                self._terminate()
            beat += 1
            # The store's host may have ended: the main thread meets the same in its collectives.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"peers/beat/{self.rank}", str(beat))
                if self._store.check(["peers/word"]):
                    self._word = _read(self._store)
                    self._store.set(f"peers/heard/{self.rank}", "1")
                    self._follow(self._word)

    def _terminate(self) -> None:
        with self._judging:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"peers/told/{self.rank}", "1")
            _leave(TERMINATED)

    def _follow(self, word: Word) -> None:
        """End this rank, which may wait for one that has ended, if it does not end by itself."""
        if not self._over.wait(GRACE_SECONDS):
            _leave(word.status)

    # --- what the main thread says ----------------------------------------------------------------

    def tell(self, status: int, message: str) -> bool:
        """Say that this rank ends by an error of its own; whether it is the first to say anything."""
        return self._say(Word(rank=self.rank, status=status, message=message))

    def _say(self, said: Word) -> bool:
        word = json.dumps(asdict(said))
        try:
            return bool(self._main.compare_set("peers/word", "", word).decode() == word)
        except RuntimeError:
            return self._word is None  # nobody else can be heard any more

    def part(self) -> None:
        """Before this rank ends by an error: where its process keeps the store, it stays until the others have heard.

        They would take it for lost otherwise, or tell the same mistake again. Lost ranks hear nothing and are not
        waited for. A launcher's store outlives the ranks.
        """
        with contextlib.suppress(RuntimeError):
            self._main.set(f"peers/heard/{self.rank}", "1")
            if self.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return
            if self._word is None and self._main.check(["peers/word"]):
                self._word = _read(self._main)
            lost = () if self._word is None else self._word.lost
            heard = [f"peers/heard/{rank}" for rank in range(self.world) if rank not in lost]
            deadline = time.monotonic() + 2 * GRACE_SECONDS
            while not self._main.check(heard) and time.monotonic() < deadline:
                self._over.wait(BEAT_SECONDS / 4)

    def judge(self) -> tuple[Word, bool]:
        """After an error of the transport: who ended first, and whether this rank is the one to print it.

        Takes :data:`VERDICT_SECONDS` where no rank has said a word. The message is empty where no rank was lost.
        """
        with self._judging:
            if self._word is not None:
                return self._word, False
            try:
                return self._judged()
            except RuntimeError:  # rank 0 keeps the store, where no launcher does
                if self._word is not None:  # its thread has heard meanwhile, and so rank 0 has ended
                    return self._word, False
                return Word(rank=0, status=FAILED, message=describe_lost([0], [], self.world)), True

    def _judged(self) -> tuple[Word, bool]:
        before = self._beats()
        deadline = time.monotonic() + VERDICT_SECONDS
        while time.monotonic() < deadline:
            if self._main.check(["peers/word"]):
                return _read(self._main), False
            self._over.wait(BEAT_SECONDS / 4)
        lost = [rank for rank in still(before, self._beats()) if rank != self.rank]
        told = [rank for rank in lost if self._main.check([f"peers/told/{rank}"])]
        message = describe_lost([rank for rank in lost if rank not in told], told, self.world)
        word = Word(rank=self.rank, status=FAILED, message=message, lost=tuple(lost))
        return word, self._say(word)

    def _beats(self) -> list[int]:
        return [int(value) for value in self._main.multi_get([f"peers/beat/{rank}" for rank in range(self.world)])]


def _read(store: torch.distributed.Store) -> Word:
    found = json.loads(store.get("peers/word"))
    return Word(**{**found, "lost": tuple(found["lost"])})


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
