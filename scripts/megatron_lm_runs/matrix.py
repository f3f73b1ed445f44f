"""One checkpoint of stock, handed on: to MegaScale, to other expert-parallel sizes and formats, and back to stock."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.megatron_lm_runs.combinations import BASE
from scripts.megatron_lm_runs.running import RunFailed, run
from scripts.megatron_lm_runs.stored import different

SAVED_AT = 4
PAGED = ("--megascale-checkpoint-format", "paged")
FORMS = {
    "fp32": (),
    "distributed": ("--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
}
"""Ways of storing optimizer state, with their flags."""


@dataclass(frozen=True)
class Station:
    """A run that loads what ``source`` saved and saves it again, without a step in between."""

    name: str
    source: str
    ranks: int
    expert_parallel: int
    megascale: tuple[str, ...] | None = ()
    """Flags of MegaScale beside `--megascale`; None for stock."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Of this layout."""
        return ("--expert-model-parallel-size", str(self.expert_parallel))


ORIGIN = Station("stock-ep2", "", 2, 2, None)
STATIONS = (
    Station("megascale-ep2", "stock-ep2", 2, 2),
    Station("megascale-ep1", "megascale-ep2", 1, 1),
    Station("megascale-ep4", "megascale-ep1", 4, 4),
    Station("stock-ep4", "megascale-ep4", 4, 4, None),
    Station("paged-ep4", "stock-ep4", 4, 4, PAGED),
    Station("megascale-from-paged-ep2", "paged-ep4", 2, 2),
    Station("stock-again-ep2", "megascale-from-paged-ep2", 2, 2, None),
)
"""All that must hand a checkpoint on unchanged. Those in the paged format are on the way: they are not compared."""
SHORT = (
    Station("megascale-ep1", "stock-ep2", 1, 1),
    Station("paged-ep2", "megascale-ep1", 2, 2, PAGED),
    Station("megascale-from-paged-ep2", "paged-ep2", 2, 2),
    Station("stock-again-ep2", "megascale-from-paged-ep2", 2, 2, None),
)
"""One way round, for a test: there and back, other sizes, both formats."""


class Relay:
    """Checkpoints handed from station to station; each station runs when it is first asked for, and once.

    Args:
        megatron_lm: the checkout. form: one of ``FORMS``. folder: for checkpoints; None: one of its own.
        stations: with every source that one of them names, but for the origin.
    """

    def __init__(
        self, megatron_lm: Path, *, form: str, folder: Path | None = None, stations: Sequence[Station] = STATIONS
    ) -> None:
        self._megatron_lm, self._form = megatron_lm, form
        self._stations = {station.name: station for station in (ORIGIN, *stations)}
        self._own = tempfile.TemporaryDirectory(prefix="megascale-matrix-") if folder is None else None
        self.folder = Path(self._own.name) if self._own is not None else folder or Path()
        self._ran: dict[str, RunFailed | None] = {}

    def changed(self, station: Station) -> list[str]:
        """Stored tensors of a `torch_dist` station that are not bit for bit those of the origin.

        Raises:
            RunFailed: with the station that failed, this one or one on the way to it, and its error.
        """
        self._reach(station)
        return different(saved(self.folder, ORIGIN.name), saved(self.folder, station.name))

    def _reach(self, station: Station) -> None:
        if station.name not in self._ran:
            if station.source:
                self._reach(self._stations[station.source])
            try:
                _pass(self._megatron_lm, self.folder, station, self._form)
                self._ran[station.name] = None
            except RunFailed as error:
                self._ran[station.name] = error
        failed = self._ran[station.name]
        if failed is not None:
            raise failed


def compared(stations: Sequence[Station]) -> list[Station]:
    """Those whose checkpoints are stock's."""
    return [station for station in stations if station.megascale != PAGED]


def saved(folder: Path, name: str) -> Path:
    """Where a station's checkpoint is."""
    return folder / name / f"iter_{SAVED_AT:07d}"


def _pass(megatron_lm: Path, folder: Path, station: Station, form: str) -> None:
    flags = [*BASE, "--train-iters", str(SAVED_AT), *FORMS[form], *station.flags]
    flags += ["--save", str(folder / station.name), "--save-interval", "1000000"]
    if station.source:
        flags += ["--load", str(folder / station.source), "--exit-on-missing-checkpoint"]
    if station.megascale is not None:
        flags += ["--megascale", *station.megascale]
    done = run(megatron_lm / "pretrain_gpt.py", flags, ranks=station.ranks, tensorboard=False)
    if done.status:
        raise RunFailed(f"{station.name} ({form}): {done.error}")
