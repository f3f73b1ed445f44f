"""What a run keeps and writes down about its pages: heat, traces, reports."""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path

from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.groups.dispatch import GroupDispatcher, total_stats
from megascale_omni.heat.keeper import HeatKeeper
from megascale_omni.heat.report import ReportWriter, of_newest_ranks, read_report
from megascale_omni.heat.requests import RequestReader
from megascale_omni.paging.manager import ExpertManager
from megascale_omni.paging.recorder import Recorder
from megascale_omni.pictures.canvas import new_figure

logger = logging.getLogger(__name__)

PICTURES = ("heat.png", "residency.png")


def check_paths(observe: ObserveConfig) -> None:
    """Whether a trace and a report, with its pictures at the end, can be written: now, and not after hours of training.

    Raises:
        ValueError: names the option, the path, and what is wrong with it.
    """
    if observe.trace is not None:
        path = Path(observe.trace)
        if path.is_dir():
            raise ValueError(f"observe.trace={observe.trace} is a folder; name a file in it (--megascale-trace)")
        _check_folder(path.parent, f"observe.trace={observe.trace}", "--megascale-trace")
    if observe.report is not None:
        folder, said = Path(observe.report), f"observe.report={observe.report}"
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise ValueError(f"{said} cannot be made: {there} is a file; give another folder (--megascale-report)")
        _check_folder(there, said, "--megascale-report")
        for name in PICTURES:
            if (folder / name).is_dir():
                raise ValueError(
                    f"{said}: {name} in it is a folder; remove it, or give another one (--megascale-report)"
                )


def _check_folder(folder: Path, said: str, flag: str) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"{said} cannot be written: there is no folder {folder}; make it, or give another path ({flag})"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{said} cannot be written: no permission to write in {folder}; give another path ({flag})")


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
        check_paths(observe)
        self.keeper = HeatKeeper(manager, heat) if heat.enabled else None
        self._recorder: Recorder | None = None
        self._report: ReportWriter | None = None
        self._requests: RequestReader | None = None
        self._folder, self._rank = observe.report, rank
        self.dispatchers: list[GroupDispatcher] = []
        if observe.trace is not None:
            self._recorder = Recorder(manager, path_of_rank(observe.trace, rank=rank, world=world))
        if observe.report is not None:
            new_figure(1, 1)  # now, and not after hours of training
            # Before the report's lines, so that the line of a step has what was done after it.
            self._requests = RequestReader(manager, observe.report, rank=rank)
            self._report = ReportWriter(
                manager, self.keeper, observe.report, rank=rank, world=world, groups=self.groups
            )
        if self._recorder is not None or self._report is not None:
            atexit.register(self.close)  # a script that never says that it has ended

    def groups(self) -> dict[str, float] | None:
        """What the groups dispatchers of the run did so far; None where there are none."""
        return total_stats(dispatcher.stats() for dispatcher in self.dispatchers)

    def close(self) -> None:
        """Ends what is being written, and draws the report's pictures (rank 0). Idempotent.

        A picture that cannot be drawn is told in the log: what was trained is not lost for it.
        """
        atexit.unregister(self.close)
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._report is not None:
            self._report.close()
            self._report = None
            if self._rank == 0 and self._folder is not None:
                try:
                    draw_report(self._folder)
                except (ValueError, OSError) as error:
                    logger.error("%s; draw it again: megascale heat %s --png FILE", error, self._folder)


def draw_report(folder: str | Path) -> list[Path]:
    """Draws what the report has enough of; returns the files."""
    from megascale_omni.pictures.heat import draw_heat
    from megascale_omni.pictures.residency import draw_residency

    reports = read_report(folder)
    newest = of_newest_ranks(reports)
    drawn = []
    heat, residency = (Path(folder) / name for name in PICTURES)
    if all(report.heat for report in newest):
        draw_heat(newest, heat)
        drawn.append(heat)
    else:
        logger.info("no %s: the run ended before its first step, or with heat.enabled false", heat)
    if any(report.steps for report in reports):
        draw_residency(reports, residency)
        drawn.append(residency)
    return drawn
