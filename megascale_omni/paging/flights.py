"""Pages on their way, and the places that they can be in. See [Note: life of a page]."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass

from megascale_omni.paging.copies import Copier
from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.mover import Mover
from megascale_omni.paging.tiers import Arena, TierKind


class FlightKind(enum.Enum):
    """Which way a page is going."""

    LOADING = "loading"
    LEAVING = "leaving"
    SINKING = "writing behind"  # from host memory to disk


@dataclass
class Flight:
    """A page on its way: its job, the slot it goes to, and (LEAVING, SINKING) where its bytes go."""

    kind: FlightKind
    future: Future[None]
    slot: int
    target: TierKind = TierKind.DEVICE


@dataclass(frozen=True)
class Tiers:
    """The places pages can be in. ``host`` has no slots and ``disk`` is None where everything is resident."""

    device: Arena
    host: Arena
    disk: DiskFile | None
    mover: Mover | None
    copier: Copier
