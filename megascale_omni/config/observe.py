"""What a run writes down about its pages: the options."""

from __future__ import annotations

from dataclasses import dataclass

from megascale_omni.config.sizes import path_or_none


@dataclass(frozen=True)
class ObserveConfig:
    """What a run writes down about its pages. Nothing of it changes a result.

    Attributes:
        trace: file for a trace of every use of a page, to be replayed under other policies and budgets.
        report: folder for what happened to pages over time, with pictures at the end.
        routing: folder for what every router chose, for `megascale topology plan` and `simulate`.
    """

    trace: str | None = None
    report: str | None = None
    routing: str | None = None

    def __post_init__(self) -> None:
        for key, what in {"trace": "file", "report": "folder", "routing": "folder"}.items():
            object.__setattr__(self, key, path_or_none(getattr(self, key), key=f"observe.{key}", what=what))
