"""What checkpoints are like: the options, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

from megascale_omni.config.sizes import parse_bytes

CheckpointFormat = Literal["stock", "paged"]


@dataclass(frozen=True)
class CheckpointConfig:
    """What checkpoints are like.

    Attributes:
        format: ``stock``, the training framework's own, or ``paged``, the project's.
        beside: whether a save goes on beside training. full_every: every n-th save stores all pages, those between only
            what changed. keep: newest checkpoints that stay, at least 2; None keeps all.
        staging_bytes: memory that a save beside training may take for copies.
        cpus: cores that its thread is bound to, as in ``0,2-4``; None for all.
    """

    format: CheckpointFormat = "stock"
    beside: bool = False
    full_every: int = 1
    keep: int | None = None
    staging_bytes: int = 64 * 2**20
    cpus: str | None = None

    def __post_init__(self) -> None:
        if self.format not in get_args(CheckpointFormat):
            known = ", ".join(get_args(CheckpointFormat))
            raise ValueError(f"checkpoint.format={self.format!r} is unknown; choose one of {known}")
        if not isinstance(self.beside, bool):
            raise ValueError(f"checkpoint.beside={self.beside!r} must be true or false")
        for key, least in (("full_every", 1), ("keep", 2)):
            value = getattr(self, key)
            if (value is None and key == "keep") or (type(value) is int and value >= least):
                continue
            raise ValueError(f"checkpoint.{key}={value!r} must be a whole number, {least} or more")
        object.__setattr__(self, "staging_bytes", parse_bytes(self.staging_bytes, key="checkpoint.staging_bytes"))
        self.cpu_set()
        changed = [f.name for f in fields(self) if f.name != "format" and getattr(self, f.name) != f.default]
        if changed and self.format == "stock":
            raise ValueError(
                f"checkpoint.{changed[0]}={getattr(self, changed[0])} has no effect on stock's format; "
                "add checkpoint.format: paged (--megascale-checkpoint-format paged)"
            )

    def cpu_set(self) -> frozenset[int] | None:
        """``cpus`` as numbers. ValueError where it is no list of them."""
        if self.cpus is None:
            return None
        found: set[int] = set()
        for part in str(self.cpus).split(","):
            match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise ValueError(f"checkpoint.cpus={self.cpus!r} is not a list of cores; write e.g. 0,2-4")
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
        return frozenset(found)
