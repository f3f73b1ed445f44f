"""How experts are cut into pages, and where pages may be: the options, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megascale_omni.config.sizes import check_number, parse_budget, parse_bytes, path_or_none
from megascale_omni.paging.layout import DEFAULT_PAGE_BYTES, MAX_PAGE_BYTES, MIN_PAGE_BYTES

Checksum = Literal["auto", "xxh3", "crc32", "off"]
Prefetch = Literal["none", "history", "early-router"]


@dataclass(frozen=True)
class PagingConfig:
    """How experts are cut into pages, and where pages may be.

    Attributes:
        page_size_bytes: weight bytes of a page, 64 KiB to 64 MiB (an expert smaller than that is one page).
        device_budget: device memory for pages of all planes: bytes, ``8GiB``, ``25%`` of all pages, ``auto`` (what is
            available), or None: everything stays in device memory.
        host_budget: host memory behind it, in the same terms; 0 for none.
        disk_path: folder for the scratch file that holds what fits in neither; needed with a device budget.
        checksum: of every page read from disk: ``xxh3``, ``crc32``, ``off``, or ``auto`` (xxh3 where it is installed).
        prefetch: which pages are fetched before they are needed: ``none``; those that the schedule and the past tell
            (``history``); and, with ``early-router``, those that a layer's router chooses for the layer before it.
        step_in_backward: whether gradients are completed, and pages stepped where no clipping waits for all of them, in
            the backward that is their last; off for loops that compute more backwards than they announce.
        max_lag_steps: most optimizer steps that a page of an unused expert may wait; 0 steps every page at every step.
        emergency_percent: where less of device memory is free, pages give some back; 0 never looks.
        compact_percent: where more of the device arena's memory holds no page at a step's end, pages move together and
            memory returns to the system; 100: never. compact_seconds: and after so much time; 0: never.
    """

    page_size_bytes: int = DEFAULT_PAGE_BYTES
    device_budget: str | int | None = None
    host_budget: str | int = 0
    disk_path: str | None = None
    checksum: Checksum = "auto"
    prefetch: Prefetch = "history"
    step_in_backward: bool = True
    max_lag_steps: int = 100
    emergency_percent: float = 5.0
    compact_percent: float = 100.0
    compact_seconds: float = 0.0

    def __post_init__(self) -> None:
        size = parse_bytes(self.page_size_bytes, key="paging.page_size_bytes")
        if not MIN_PAGE_BYTES <= size <= MAX_PAGE_BYTES:
            raise ValueError(
                f"paging.page_size_bytes={self.page_size_bytes} is outside {MIN_PAGE_BYTES} (64KiB) to "
                f"{MAX_PAGE_BYTES} (64MiB); choose a size in between, e.g. 16MiB"
            )
        if self.checksum is False:  # what YAML makes of an unquoted `off`
            object.__setattr__(self, "checksum", "off")
        if self.checksum not in get_args(Checksum):
            known = ", ".join(get_args(Checksum))
            raise ValueError(f"paging.checksum={self.checksum!r} is unknown; choose one of {known}")
        if isinstance(self.max_lag_steps, bool) or not isinstance(self.max_lag_steps, int) or self.max_lag_steps < 0:
            raise ValueError(f"paging.max_lag_steps={self.max_lag_steps!r} must be a whole number of steps, 0 or more")
        check_number("paging", self, "emergency_percent", most=40.0, what="between 0 and 40: it is doubled")
        check_number("paging", self, "compact_percent", most=100.0, what="a percentage between 0 and 100")
        check_number("paging", self, "compact_seconds", most=float("inf"), what="0 or more")
        if self.prefetch not in get_args(Prefetch):
            known = ", ".join(get_args(Prefetch))
            raise ValueError(f"paging.prefetch={self.prefetch!r} is unknown; choose one of {known}")
        if not isinstance(self.step_in_backward, bool):
            raise ValueError(f"paging.step_in_backward={self.step_in_backward!r} must be true or false")
        for key in ("device_budget", "host_budget"):
            if getattr(self, key) not in (None, "auto"):
                parse_budget(getattr(self, key), key=f"paging.{key}")
        if self.disk_path is not None:
            object.__setattr__(self, "disk_path", path_or_none(self.disk_path, key="paging.disk_path", what="folder"))
        if self.device_budget is not None and self.disk_path is None:
            raise ValueError(
                f"paging.device_budget={self.device_budget} needs a folder on a disk for the pages that do not fit; "
                "give paging.disk_path (--megascale-disk-path)"
            )
        object.__setattr__(self, "page_size_bytes", size)
