"""What a run wrote down about clipping: reading its JSON lines, and summing them up."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModuleSeries:
    """One module, step by step. A threshold is NaN where clipping was off; what was not finite is NaN, and all is where
    a run had other modules before or after a restart.
    """

    name: str
    norms: tuple[float, ...]
    gvcs: tuple[float, ...]
    thresholds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def log_spread(self) -> float:
        """Standard deviation of log10 of the norm over steps; NaN below two steps with a norm above 0."""
        logs = [math.log10(norm) for norm in self.norms if norm > 0]
        return statistics.pstdev(logs) if len(logs) > 1 else math.nan

    @property
    def clipped_share(self) -> float:
        """Part of the steps with this module at which it was clipped."""
        known = [ratio for ratio in self.ratios if math.isfinite(ratio)]
        return sum(ratio < 1 for ratio in known) / len(known) if known else math.nan


@dataclass(frozen=True)
class ClipRecord:
    """A run's clipping. ``alphas``: NaN while off; ``skipped_steps``: at the end; ``non_finite``: step and place."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    alphas: tuple[float, ...]
    modules: tuple[ModuleSeries, ...]
    skipped_steps: int
    non_finite: tuple[tuple[int, str], ...]


def read_clip_record(run: str | Path) -> ClipRecord:
    """Of a file of JSON lines, or of the one ``*.jsonl`` in a folder; of steps that were made again the last count.

    Raises:
        ValueError: no such file, several of them, a line that is no JSON, or no step with clipping by module.
    """
    path = _file_of(Path(run))
    by_step: dict[int, dict[str, object]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; give the file of --metrics-jsonl") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # the run was killed while it wrote
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if isinstance(record, dict) and record.get("event") == "step" and "mpus" in (record.get("clip") or {}):
            by_step[int(record["iteration"])] = record
    if not by_step:
        raise ValueError(
            f"{path} has no step with clipping by module; train with --megascale-clip cmsa and give the file of "
            "--metrics-jsonl (--megascale-report writes of pages only)"
        )
    return _record([by_step[step] for step in sorted(by_step)])


def _file_of(run: Path) -> Path:
    if not run.is_dir():
        return run
    found = sorted(run.glob("*.jsonl"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{run} holds not one file of JSON lines ({names}); name the one of --metrics-jsonl")
    return found[0]


def _record(records: Sequence[dict[str, object]]) -> ClipRecord:
    clips: list[dict[str, object]] = [record["clip"] for record in records]  # type: ignore[misc]
    names: list[str] = list(dict.fromkeys(name for clip in clips for name in clip["mpus"]))  # type: ignore[attr-defined]
    steps = tuple(int(record["iteration"]) for record in records)  # type: ignore[call-overload]
    bad = [(step, str(c["non_finite"])) for step, c in zip(steps, clips, strict=True) if c["non_finite"] is not None]
    return ClipRecord(
        steps=steps,
        losses=tuple(_number(record["loss"]) for record in records),
        alphas=tuple(_number(clip["alpha"]) for clip in clips),
        modules=tuple(_series(name, clips) for name in names),
        skipped_steps=int(clips[-1]["skipped_steps"]),  # type: ignore[call-overload]
        non_finite=tuple(bad),
    )


def _series(name: str, clips: Sequence[dict[str, object]]) -> ModuleSeries:
    def of(key: str) -> tuple[float, ...]:
        return tuple(_number(clip["mpus"].get(name, {}).get(key)) for clip in clips)  # type: ignore[attr-defined]

    return ModuleSeries(name, of("norm"), of("gvc"), of("threshold"), of("clip_ratio"))


def _number(value: object) -> float:
    """Numbers that are not finite were written as text."""
    number = float(value) if isinstance(value, (int, float, str)) else math.nan
    return number if math.isfinite(number) else math.nan
