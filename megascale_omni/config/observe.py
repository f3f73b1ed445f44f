"""What a run writes down about its pages: the options."""

from __future__ import annotations

from dataclasses import dataclass


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
