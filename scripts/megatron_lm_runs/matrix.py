"""One checkpoint of stock, handed on: to MegaScale, to other expert-parallel sizes and formats, and back to stock."""

from __future__ import annotations

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
"""In an order in which every source comes before its readers. Only `torch_dist` ones are compared."""


def hand_on(megatron_lm: Path, folder: Path, *, form: str, stations: Sequence[Station] = STATIONS) -> dict[str, int]:
    """Runs all; by station, the number of stored tensors that are not bit for bit those of the origin.

    Raises:
        RunFailed: with the station and the error.
    """
    found: dict[str, int] = {}
    for station in (ORIGIN, *stations):
        _pass(megatron_lm, folder, station, form)
        if station is not ORIGIN and station.megascale != PAGED:
            found[station.name] = len(different(saved(folder, ORIGIN.name), saved(folder, station.name)))
    return found


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
