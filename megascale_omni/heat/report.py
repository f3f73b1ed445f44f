"""What happened to pages and experts over a run, in a folder: one file of JSON lines a rank.

[Note: report folder]
``rank0.jsonl`` begins with a line of kind ``begin`` (how many ranks there are) and one of kind ``run`` (modules,
experts, the arena's limit), which is written again where something of it has changed: after a resize, say. A line of
kind ``step`` follows every training step: bytes by tier and plane, counters since the process began, of pages and of
the groups dispatcher, and how long the step took, without what followed it (validation, a save). A line of kind
``heat`` follows every look at the heat map, and the last step: for each module its experts' states, one digit each
(see states.Heat), scores in hundredths, and milliseconds of work since the process began [Note: work time]. A line of
kind ``end`` is the last one, where the run was not killed.

A run that resumes goes on in the same files: what they tell of steps that it makes again is cut off, and another
``begin`` says that counters start anew. A run from step 1 begins them anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.tiers import TierKind

logger = logging.getLogger(__name__)

TIERS = (TierKind.DEVICE, TierKind.HOST, TierKind.DISK)


class ReportWriter:
    """Writes a rank's file.

    Raises:
        ValueError: the folder cannot be made or written.
    """

    def __init__(
        self,
        manager: ExpertManager,
        keeper: HeatKeeper | None,
        folder: str | Path,
        *,
        rank: int,
        world: int = 1,
        groups: Callable[[], dict[str, float] | None] = lambda: None,
    ) -> None:
        self._manager, self._keeper, self._groups = manager, keeper, groups
        self._world = world
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._path = Path(folder) / f"rank{rank}.jsonl"
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"report folder {folder} cannot be written: {error.strerror}; give another one (--megascale-report)"
            ) from error
        self._described = ""
        self._told = self._looked = 0  # newest step with a line, and with a look
        self._start = time.monotonic()
        self._sizes = np.zeros(0)
        self._began: float | None = None  # the step at hand, where its line is not written yet
        manager.schedule.on_step(self._begin)
        manager.schedule.on_step_end(self._end)
        if keeper is not None:
            keeper.on_refresh = self._heat

    def _write(self, kind: str, **values: object) -> None:
        if not self._file.closed:
            with self._or_end():
                self._file.write(json.dumps({"kind": kind, **values}) + "\n")
                self._file.flush()  # the process may be killed

    @contextmanager
    def _or_end(self) -> Iterator[None]:
        """A report that cannot be written any more, on a full disk, say, must not end what it reports."""
        try:
            yield
        except OSError as error:
            logger.error("the report %s ends here: %s; the run goes on", self._path, error.strerror or error)
            with suppress(OSError):
                self._file.close()

    def _go_on(self, step: int) -> None:
        """The first line is about to be written: of earlier runs what came before ``step``, the next one, stays."""
        with self._or_end():
            self._file.truncate(length_before(self._path, step))
        self._write("begin", world=self._world)
        self._told = step - 1

    def _describe(self, step: int) -> None:
        if not self._described:
            self._go_on(step)
        manager = self._manager
        modules = [
            {"path": manager.numbering.path(m.entry.module), "experts": m.entry.num_experts} for m in manager.modules
        ]
        limits = [(c, manager.arena.limit(c)) for c in manager.arena.slot_classes()]
        known = [slots * c.nbytes for c, slots in limits if slots is not None]
        limit = sum(known) if len(known) == len(limits) else None
        text = json.dumps([modules, limit])
        if text != self._described:
            self._described = text
            self._write("run", modules=modules, limit_bytes=limit)
        table = manager.table
        nbytes = np.array([*(c.nbytes for c in table.classes), 0])
        self._sizes = nbytes[table.class_index]

    def _begin(self) -> None:
        self._step(self._manager.schedule.moment.step - 1)  # where nobody said that it had ended
        self._began = time.monotonic()

    def _end(self) -> None:
        self._step(self._manager.schedule.moment.step)

    def _step(self, done: int) -> None:
        began, self._began = self._began, None
        if began is None or self._file.closed:
            return
        now = time.monotonic()
        self._describe(done)
        self._told = done
        table = self._manager.table
        planes = np.arange(len(table.tier)) % NUM_PLANES
        here = table.tier == TierKind.DEVICE
        self._write(
            "step",
            step=done,
            seconds=round(now - self._start, 3),
            step_seconds=round(now - began, 4),
            tiers={t.name.lower(): int(self._sizes[table.tier == t].sum()) for t in TIERS},
            planes={p.name.lower(): int(self._sizes[here & (planes == p)].sum()) for p in Plane},
            counts=self._manager.stats(),
            groups=self._groups(),
        )

    def _heat(self, step: int) -> None:
        assert self._keeper is not None
        if self._file.closed:
            return
        self._describe(step)
        self._looked = step - 1
        looks = [self._keeper.look(module) for module in self._manager.modules]
        self._write(
            "heat",
            step=step - 1,
            states=["".join(map(str, states.tolist())) for states, _ in looks],
            scores=[(score * 100).round().astype(int).tolist() for _, score in looks],
            work_milliseconds=[self._work_of(module.entry.module) for module in self._manager.modules],
            counts=self._keeper.counts,
        )

    def _work_of(self, module: int) -> list[int] | None:
        assert self._keeper is not None
        seconds = self._keeper.map.work_time.seconds(module)
        return None if seconds is None else (seconds * 1e3).round().astype(int).tolist()

    def close(self) -> None:
        """Ends the file, with a last look at the heat map where steps followed the one before. Idempotent."""
        if not self._file.closed and self._keeper is not None and self._described and self._told > self._looked:
            self._heat(self._told + 1)
        if self._described:
            self._write("end")
        self._file.close()


def length_before(path: Path, step: int) -> int:
    """How much of a rank's file, in bytes, a run keeps that goes on with ``step``: whole lines about steps before it.

    The look after the last of them is left out: that run looks again. 0 where nothing stays.
    """
    length = end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                values: Any = json.loads(line) if line.endswith(b"\n") else None
                told = {"step": 0, "heat": 1}.get(values["kind"])
            except (ValueError, KeyError, TypeError):
                break
            if told is not None:
                if values["step"] + told >= step:
                    break
                length = end
    return length


Line = dict[str, Any]
"""A line of a report; which keys it has depends on its kind."""


@dataclass
class RankReport:
    """A rank's file, read. ``steps`` and ``heat`` are the lines of these kinds, in order.

    The lines of steps have two more keys: ``limit_bytes`` of the arena then (None: no limit), and ``world``, how many
    ranks there were; and their counters go on where a run was resumed.
    """

    rank: int
    modules: list[Line] = field(default_factory=list)
    limit_bytes: int | None = None
    world: int | None = None
    ended: bool = False
    steps: list[Line] = field(default_factory=list)
    heat: list[Line] = field(default_factory=list)


class _Totals:
    """Counters of the processes before the one at hand."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, steps: Sequence[Line]) -> None:
        """Another process begins; its counters go on from those of the last step so far."""
        if steps:
            self._counts = steps[-1]["counts"]

    def plus(self, counts: dict[str, int]) -> dict[str, int]:
        """Counters since the first process began."""
        return {name: counts.get(name, 0) + self._counts.get(name, 0) for name in {**self._counts, **counts}}


def read_report(folder: str | Path) -> list[RankReport]:
    """All ranks of a report folder, ascending.

    Raises:
        ValueError: no report there, or a line that is none of one (an unfinished last line is left out).
    """
    found = []
    for path in Path(folder).glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdigit():
            found.append(_read_rank(path, int(number)))
    if not found:
        raise ValueError(f"{folder} holds no report of a run; make one with --megascale-report FOLDER")
    return sorted(found, key=lambda report: report.rank)


def of_newest_ranks(reports: Sequence[RankReport]) -> list[RankReport]:
    """Without those of ranks that the run had before it was resumed with fewer."""
    world = reports[0].world if reports else None
    return [report for report in reports if world is None or report.rank < world]


def _read_rank(path: Path, rank: int) -> RankReport:
    report, before = RankReport(rank), _Totals()
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            values = json.loads(line)
            kind = values["kind"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # without its end: the run died in it
                continue
            raise ValueError(f"{path}, line {number}, is no line of a report: {error}") from error
        report.ended = kind == "end"
        if kind == "begin":
            before.add(report.steps)
            report.world = values["world"]
        elif kind == "run":
            if report.modules and [m["experts"] for m in report.modules] != [m["experts"] for m in values["modules"]]:
                report.heat.clear()  # more modules were built since
            report.modules, report.limit_bytes = values["modules"], values["limit_bytes"]
        elif kind == "step":
            values |= {
                "limit_bytes": report.limit_bytes,
                "world": report.world,
                "counts": before.plus(values["counts"]),
            }
            report.steps.append(values)
        elif kind == "heat":
            report.heat.append(values)
    return report
