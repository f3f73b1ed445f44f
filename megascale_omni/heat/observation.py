"""What a run keeps and writes down about its pages: heat, traces, reports."""

from __future__ import annotations

import atexit
from pathlib import Path

from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.groups.dispatch import GroupDispatcher, total_stats
from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.heat.report import ReportWriter, read_report
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.recorder import Recorder
from megascale_omni.pictures.canvas import new_figure


def path_of_rank(path: str | Path, *, rank: int, world: int) -> Path:
    """``run.trace`` of rank 3 of several is ``run.rank3.trace``."""
    path = Path(path)
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class Observation:
    """The observers of one rank's manager.

    Raises:
        ValueError: a file cannot be written. ImportError: a report's pictures need matplotlib.
    """

    def __init__(
        self, manager: ExpertManager, *, heat: HeatConfig, observe: ObserveConfig, rank: int = 0, world: int = 1
    ) -> None:
        self.keeper = HeatKeeper(manager, heat) if heat.enabled else None
        self._recorder: Recorder | None = None
        self._report: ReportWriter | None = None
        self._folder, self._rank = observe.report, rank
        self.dispatchers: list[GroupDispatcher] = []
        if observe.trace is not None:
            self._recorder = Recorder(manager, path_of_rank(observe.trace, rank=rank, world=world))
        if observe.report is not None:
            new_figure(1, 1)  # now, and not after hours of training
            self._report = ReportWriter(manager, self.keeper, observe.report, rank=rank, groups=self.groups)
        if self._recorder is not None or self._report is not None:
            atexit.register(self.close)  # a script that never says that it has ended

    def groups(self) -> dict[str, float] | None:
        """What the groups dispatchers of the run did so far; None where there are none."""
        return total_stats(dispatcher.stats() for dispatcher in self.dispatchers)

    def close(self) -> None:
        """Ends what is being written, and draws the report's pictures (rank 0). Idempotent."""
        atexit.unregister(self.close)
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self._report is not None:
            self._report.close()
            self._report = None
            if self._rank == 0 and self._folder is not None:
                draw_report(self._folder)


def draw_report(folder: str | Path) -> list[Path]:
    """Draws what the report has enough of; returns the files."""
    from megascale_omni.pictures.heat import draw_heat
    from megascale_omni.pictures.residency import draw_residency

    reports = read_report(folder)
    drawn = []
    if all(report.heat for report in reports):
        draw_heat(reports, Path(folder) / "heat.png")
        drawn.append(Path(folder) / "heat.png")
    if all(len(report.steps) > 1 for report in reports):
        draw_residency(reports, Path(folder) / "residency.png")
        drawn.append(Path(folder) / "residency.png")
    return drawn
