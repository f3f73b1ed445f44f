"""What happened to pages and experts over a run, in a folder: one file of JSON lines a rank.

[Note: report folder]
``rank0.jsonl`` begins with a line of kind ``run`` (modules, experts, the arena's limit). A line of kind ``step``
follows every training step: bytes by tier and plane, counters since the start, of pages and of the groups dispatcher,
and how long the step took, without what followed it (validation, a save). A line of kind ``heat`` follows every look at
the heat map: for each module its experts' states, one digit each (see states.Heat), and scores in hundredths.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.heat.states import scores
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.planes import NUM_PLANES, Plane
from megascale_omni.paging.tiers import TierKind

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
        groups: Callable[[], dict[str, float] | None] = lambda: None,
    ) -> None:
        self._manager, self._keeper, self._groups = manager, keeper, groups
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = (Path(folder) / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"report folder {folder} cannot be written: {error.strerror}; give another one") from error
        self._described = ""
        self._start = time.monotonic()
        self._sizes = np.zeros(0)
        self._began: float | None = None  # the step at hand, where its line is not written yet
        manager.schedule.on_step(self._begin)
        manager.schedule.on_step_end(self._end)
        if keeper is not None:
            keeper.on_refresh = self._heat

    def _write(self, kind: str, **values: object) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def _describe(self) -> None:
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
        self._describe()
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
        self._file.flush()  # the process may be killed

    def _heat(self, step: int) -> None:
        assert self._keeper is not None
        if self._file.closed:
            return
        self._describe()
        states = ["".join(map(str, self._keeper.states[m.entry.module].tolist())) for m in self._manager.modules]
        hundredths = [
            (scores(self._keeper.map.window(m.entry.module), self._keeper.config) * 100).round().astype(int).tolist()
            for m in self._manager.modules
        ]
        self._write("heat", step=step - 1, states=states, scores=hundredths, counts=self._keeper.counts)
        self._file.flush()

    def close(self) -> None:
        """Ends the file. Idempotent."""
        self._file.close()


Line = dict[str, Any]
"""A line of a report; which keys it has depends on its kind."""


@dataclass
class RankReport:
    """A rank's file, read. ``steps`` and ``heat`` are the lines of these kinds, in order."""

    rank: int
    modules: list[Line] = field(default_factory=list)
    limit_bytes: int | None = None
    steps: list[Line] = field(default_factory=list)
    heat: list[Line] = field(default_factory=list)


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


def _read_rank(path: Path, rank: int) -> RankReport:
    report = RankReport(rank)
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
        if kind == "run":
            if report.modules and [m["experts"] for m in report.modules] != [m["experts"] for m in values["modules"]]:
                report.heat.clear()  # more modules were built since
            report.modules, report.limit_bytes = values["modules"], values["limit_bytes"]
        elif kind == "step":
            report.steps.append(values)
        elif kind == "heat":
            report.heat.append(values)
    return report
