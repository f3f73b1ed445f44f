"""A save beside training has every byte as it was at the call, whatever changes when, in bounded memory."""

import threading
from functools import partial
from itertools import islice

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megascale_omni.checkpoint.snapshot import Snapshot

TIMEOUT_SECONDS = 30.0


class Willing(threading.Condition):
    """Lets the writer make one step whenever the trainer has to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: Writer | None = None
        self.waits = 0

    def wait_for(self, predicate, timeout=None):
        while not predicate():
            self.waits += 1
            assert self.writer is not None
            self.release()
            self.writer.step()
            self.acquire()
        return True


class Writer(threading.Thread):
    """Takes chunks in order and lets them go in batches, one step for each permit."""

    def __init__(self, snapshot, takes, batches, fails_at) -> None:
        super().__init__(daemon=True)
        self.snapshot, self.takes, self.batches, self.fails_at = snapshot, takes, batches, fails_at
        self.written: list[bytes] = []
        self.permits, self.stepped = threading.Semaphore(0), threading.Semaphore(0)

    def step(self) -> None:
        self.permits.release()
        assert self.stepped.acquire(timeout=TIMEOUT_SECONDS)

    def run(self) -> None:
        try:
            rest = iter(enumerate(self.takes))
            for size in self.batches:
                data = []
                for number, take in islice(rest, size):
                    self.permits.acquire()
                    if number == self.fails_at:
                        return
                    data.append(take())
                    self.stepped.release()
                self.permits.acquire()
                self.written += [bytes(part) for part in data]  # in place until here
                self.snapshot.release()
                self.stepped.release()
        finally:
            self.snapshot.end()
            self.stepped.release()


class SnapshotMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
        batch=st.integers(1, 4),
        limit=st.integers(40, 200),
        fails_at=st.none() | st.integers(0, 11),
        data=st.data(),
    )
    def begin(self, sizes, batch, limit, fails_at, data):
        self.chance = np.random.default_rng(len(sizes))
        self.arrays = [self.chance.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        self.at_call = [array.tobytes() for array in self.arrays]
        self.keys = [data.draw(st.integers(0, 4), label="key") for _ in sizes]
        self.limit = limit
        self.snapshot = Snapshot(limit_bytes=limit)
        condition = self.snapshot._changed = Willing()
        takes = [
            self.snapshot.register(key, partial(getattr, array, "data"), len(array))
            for key, array in zip(self.keys, self.arrays, strict=True)
        ]
        batches = [batch] * (len(sizes) // batch + 1)
        self.fails_at = fails_at if fails_at is not None and fails_at < len(sizes) else None
        self.writer = condition.writer = Writer(self.snapshot, takes, batches, self.fails_at)
        self.writer.start()

    @precondition(lambda self: self.writer.is_alive())
    @rule()
    def the_writer_makes_a_step(self):
        self.writer.step()

    @rule(keys=st.sets(st.integers(0, 4), min_size=1, max_size=3))
    def training_changes(self, keys):
        self.snapshot.before_write(sorted(keys))
        for key, array in zip(self.keys, self.arrays, strict=True):
            if key in keys:
                array[:] = self.chance.integers(0, 256, len(array), dtype=np.uint8)

    @invariant()
    def copies_are_bounded(self):
        if hasattr(self, "snapshot"):
            assert self.snapshot.peak_staged_bytes <= self.limit

    def teardown(self):
        if not hasattr(self, "writer"):
            return
        for _ in range(100):
            self.writer.permits.release()
        self.writer.join(TIMEOUT_SECONDS)
        assert not self.writer.is_alive()
        if self.fails_at is None:
            assert self.writer.written == self.at_call
            assert self.snapshot._staged_bytes == 0
        else:
            assert self.writer.written == self.at_call[: len(self.writer.written)]
        self.snapshot.before_write(range(5))  # waits for nobody any more


SnapshotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSnapshot = SnapshotMachine.TestCase


def test_without_room_for_copies_training_waits_for_the_writer():
    snapshot = Snapshot(limit_bytes=10)
    condition = snapshot._changed = Willing()
    arrays = [np.full(8, number, np.uint8) for number in range(3)]
    takes = [snapshot.register(0, partial(getattr, array, "data"), 8) for array in arrays]
    writer = condition.writer = Writer(snapshot, takes, [1, 1, 1], None)
    writer.start()
    snapshot.before_write([0])
    for array in arrays:
        array[:] = 99
    assert condition.waits > 0
    for _ in range(10):
        writer.permits.release()
    writer.join(TIMEOUT_SECONDS)
    assert writer.written == [bytes([number]) * 8 for number in range(3)]
    assert snapshot.peak_staged_bytes == 8
