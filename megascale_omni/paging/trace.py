"""Traces: what happened to pages during a run, in a file.

[Note: trace file]
A trace begins with ``MSTRACE1``. Then come frames: kind (1 byte), length and crc32 of the payload (little-endian
uint32 each), payload. An ``M`` frame is JSON and says what modules and planes there are (another one follows when more
appear); an ``E`` frame is a zlib stream of little-endian int32: events one after the other, each ``op, n, n numbers``.
Frames are whole or missing: a run that ended in the middle of a write leaves a trace that is read up to there.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megascale_omni.paging.planes import PageNumbering, Plane
from megascale_omni.schedule import Phase

MAGIC = b"MSTRACE1"
_HEAD = struct.Struct("<cII")
FRAME_NUMBERS = 1 << 16
"""Numbers after which events are written to the file."""


class Op(enum.IntEnum):
    """What happened. Numbers that follow are page ids unless something else is said."""

    STEP = 1  # a training step begins: its number
    VISIT = 2  # a sweep begins: phase, module, planes (bits), then pages (numbers from 0 in the module)
    HOLD = 3  # pages are used from here ...
    RELEASE = 4  # ... to here
    CREATE = 5  # absent pages came into being
    DROP = 6  # pages ceased to be
    WRITE = 7  # pages are changed
    REACH = 8  # all pages of a group are held: the last one's number in the module


@dataclass(frozen=True)
class TracedModule:
    """A module of a trace. ``slot_bytes`` by plane name: what a page of the plane takes; slots of one size are shared.

    ``floor_pages`` by plane: pages of its slots that must be in the arena at once.
    """

    path: str
    experts: int
    slices: int
    slot_bytes: dict[str, int]
    slot_kind: dict[str, str]
    floor_pages: dict[str, int]


@dataclass(frozen=True)
class TracedModel:
    """What was traced: its modules in the order of their ids."""

    modules: tuple[TracedModule, ...]

    def numbering(self) -> PageNumbering:
        """The numbering of its pages."""
        numbering = PageNumbering()
        for module in self.modules:
            numbering.register(path=module.path, num_experts=module.experts, num_slices=module.slices)
        return numbering

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages of all planes."""
        return sum(m.experts * m.slices * nbytes for m in self.modules for nbytes in m.slot_bytes.values())


@dataclass(frozen=True)
class Event:
    """One event; ``numbers`` is int32."""

    op: Op
    numbers: np.ndarray


class TraceWriter:
    """Writes a trace. Use as a context manager, or close it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file: BinaryIO = self.path.open("wb")
        except OSError as error:
            raise ValueError(f"trace file {path} cannot be written: {error.strerror}") from error
        self._file.write(MAGIC)
        self._numbers = array("i")

    def model(self, model: TracedModel) -> None:
        """Says what modules there are from here on."""
        self.flush()
        self._frame(b"M", json.dumps([asdict(module) for module in model.modules]).encode())

    def event(self, op: Op, numbers: Iterable[int]) -> None:
        """Adds an event."""
        start = len(self._numbers)
        self._numbers.extend((op, 0))
        self._numbers.extend(numbers)
        self._numbers[start + 1] = len(self._numbers) - start - 2
        if len(self._numbers) >= FRAME_NUMBERS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added so far."""
        if self._numbers:
            data = np.frombuffer(self._numbers, dtype=np.int32).astype("<i4").tobytes()
            self._frame(b"E", zlib.compress(data, level=1))
            self._numbers = array("i")
        self._file.flush()

    def _frame(self, kind: bytes, payload: bytes) -> None:
        self._file.write(_HEAD.pack(kind, len(payload), zlib.crc32(payload)) + payload)

    def close(self) -> None:
        """Writes what is left. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Trace:
    """A trace in memory. ``whole`` is false where the last frame was cut off."""

    model: TracedModel
    numbers: np.ndarray
    whole: bool

    def __iter__(self) -> Iterator[Event]:
        numbers, place = self.numbers, 0
        while place < len(numbers):
            op, count = int(numbers[place]), int(numbers[place + 1])
            if not 0 <= count <= len(numbers) - place - 2:
                raise ValueError(f"an event of {count} numbers, where there are {len(numbers) - place - 2}")
            yield Event(Op(op), numbers[place + 2 : place + 2 + count])
            place += 2 + count

    def events(self) -> list[Event]:
        """All events."""
        return list(self)


def read_trace(path: str | Path) -> Trace:
    """Reads a trace.

    Raises:
        ValueError: no trace, a damaged one, or one without a model.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"trace file {path} cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise ValueError(f"{path} is no trace of MegaScale; record one with --megascale-trace FILE")
    model: TracedModel | None = None
    parts: list[np.ndarray] = []
    place, whole = len(MAGIC), True
    while place < len(data):
        end = place + _HEAD.size
        if end > len(data) or end + _HEAD.unpack_from(data, place)[1] > len(data):
            whole = False
            break
        kind, length, crc = _HEAD.unpack_from(data, place)
        payload = data[end : end + length]
        if zlib.crc32(payload) != crc or kind not in (b"M", b"E"):
            raise ValueError(f"trace file {path} is damaged at byte {place}; record it again")
        try:
            if kind == b"M":
                model = TracedModel(tuple(TracedModule(**module) for module in json.loads(payload)))
            else:
                parts.append(np.frombuffer(zlib.decompress(payload), dtype="<i4"))
        except (ValueError, TypeError, zlib.error) as error:
            raise ValueError(f"trace file {path} is damaged at byte {place} ({error}); record it again") from error
        place = end + length
    if model is None or not model.modules:
        raise ValueError(f"trace file {path} names no modules: the run ended before it had any")
    trace = Trace(model, np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32), whole)
    _check(trace, path)
    return trace


def _check(trace: Trace, path: str | Path) -> None:
    """Every event is known, whole, and speaks of phases, modules and pages that the model has."""
    known = _pages_of(trace.model, path)
    least = {Op.STEP: 1, Op.REACH: 1, Op.VISIT: 3}
    try:
        for event in trace:
            numbers = event.numbers
            good = len(numbers) >= least.get(event.op, 0)
            if good and event.op is Op.VISIT:
                good = 0 <= numbers[0] < len(Phase) and 0 <= numbers[1] < len(trace.model.modules)
                if good and len(numbers) > 3:
                    module = trace.model.modules[numbers[1]]
                    good = bool(0 <= numbers[3:].min() <= numbers[3:].max() < module.experts * module.slices)
            elif good and event.op not in least and len(numbers):
                good = bool(0 <= numbers.min() <= numbers.max() < len(known) and known[numbers].all())
            if not good:
                raise ValueError(f"{event.op.name.lower()} of a page, phase or module that it does not have")
    except (ValueError, IndexError) as error:
        raise ValueError(f"trace file {path} does not fit its own model: {error}; record it again") from error


def _pages_of(model: TracedModel, path: str | Path) -> np.ndarray:
    """Mask over page ids: those of planes that their module has. ValueError where modules are none that can be."""
    parts = []
    for module in model.modules:
        planes = module.slot_bytes.keys()
        good = all(isinstance(count, int) and count > 0 for count in (module.experts, module.slices))
        good = good and planes == module.slot_kind.keys() == module.floor_pages.keys()
        if not good or not planes <= {plane.name.lower() for plane in Plane}:
            raise ValueError(f"trace file {path} describes a module that cannot be: {module.path}; record it again")
        row = np.array([plane.name.lower() in planes for plane in Plane])
        parts.append(np.tile(row, module.experts * module.slices))
    return np.concatenate(parts)
