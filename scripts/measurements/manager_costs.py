"""What the heat map and the policies cost: their time on the main thread, by the clock, inside real training steps.

    python -m scripts.measurements.manager_costs FLAGS_OF_PRETRAIN_MOE

A difference of two runs cannot tell 0.3 % of a step from noise. Instead, whatever belongs to heat and to policy is
timed where it is called, in a training of the project's own trainer; calls inside calls count once, and what timing
costs counts as well. The last line of standard output is JSON: seconds of each measured step, and of these in heat and
in policy.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scripts.measuring.processes import ROOT
from scripts.measuring.statistics import summarize

WARMUP_STEPS = 4
"""Steps until pages, forecast and allocations are what they stay."""

_TIMEOUT_SECONDS = 600.0
Kind = str


class Clock:
    """Seconds spent in functions of each kind; a call from within another counts for the outer one."""

    def __init__(self) -> None:
        self.seconds = {"heat": 0.0, "policy": 0.0}
        self._inside = False

    def timed(self, call: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        """``call``, timed."""

        @functools.wraps(call)
        def wrapped(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever it takes
            if self._inside:
                return call(*arguments, **options)
            self._inside, start = True, time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds[kind] += time.perf_counter() - start
                self._inside = False

        return wrapped


def _targets() -> Iterator[tuple[object, str, Kind]]:
    """(class or module, name, kind) of all that decides or keeps count."""
    from megascale_omni.heat import heatmap, keeper
    from megascale_omni.paging import ahead, manager, outlook, residency, shadow, upkeep, victims, visits

    for name in ("visited", "routed"):  # the others do nothing
        yield heatmap.HeatMap, name, "heat"
    yield keeper.HeatKeeper, "_step", "heat"
    for name in ("begin", "reached", "end_step", "update", "next_use", "probable", "foresee"):
        yield outlook.Outlook, name, "policy"
    yield shadow.Shadows, "use", "policy"
    for name in ("choose", "forget"):
        yield victims.Victims, name, "policy"
    yield ahead.Ahead, "_held_until", "policy"
    yield upkeep.Upkeep, "look", "policy"
    yield visits.Visits, "_next_visit_pages", "policy"
    for name in ("create", "drop", "may_load", "load_ahead", "loaded", "not_loaded", "leave", "stayed"):
        yield shadow.ShadowLru, name, "policy"
    package = manager.__name__.rpartition(".")[0]
    for module in [m for n, m in sys.modules.items() if n.startswith(package)]:
        for name in ("choose_victims", "displaced_before", "pages_ahead", "probable_experts"):
            if getattr(module, name, None) is getattr(residency, name):  # wherever it was imported to
                yield module, name, "policy"


@contextmanager
def timed_policies(clock: Clock) -> Iterator[None]:
    """While it lasts, everything of :func:`_targets` is timed."""
    targets = list(_targets())
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
    for owner, name, kind in targets:
        setattr(owner, name, clock.timed(getattr(owner, name), kind))
    try:
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def main(argv: Sequence[str]) -> int:
    """Trains with the flags given, and prints what was measured."""
    from megascale_omni.schedule import Schedule
    from scripts.moe_trainer.main import main as train

    clock, marks = Clock(), []
    begin_step = Schedule.begin_step

    def marked(self: Schedule, step: int) -> None:
        marks.append((time.perf_counter(), dict(clock.seconds)))
        begin_step(self, step)

    with timed_policies(clock):
        Schedule.begin_step = marked  # type: ignore[method-assign]
        try:
            status = train(argv)
        finally:
            Schedule.begin_step = begin_step  # type: ignore[method-assign]
    steps = [
        {"seconds": after[0] - before[0], **{kind: after[1][kind] - before[1][kind] for kind in clock.seconds}}
        for before, after in zip(marks[WARMUP_STEPS:], marks[WARMUP_STEPS + 1 :], strict=False)
    ]
    print(json.dumps({"steps": steps}), flush=True)
    return status


@dataclass(frozen=True)
class Cost:
    """Medians over the measured steps."""

    step_seconds: float
    heat_share: float
    policy_share: float

    @property
    def share(self) -> float:
        """Of a step, in heat and in policy."""
        return self.heat_share + self.policy_share


def measure(flags: Sequence[str]) -> Cost:
    """What heat and policies cost in a training of ``flags``, made in a process of its own.

    Raises:
        RuntimeError: the training failed, or has no measured step.
    """
    command = [sys.executable, "-m", "scripts.measurements.manager_costs", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    steps = json.loads(done.stdout.strip().splitlines()[-1])["steps"]
    if not steps or not sum(step["policy"] + step["heat"] for step in steps):
        raise RuntimeError(f"{' '.join(command)}: no step, or no policy, was measured")
    total = sum(step["seconds"] for step in steps)
    return Cost(
        summarize([step["seconds"] for step in steps]).median,
        sum(step["heat"] for step in steps) / total,
        sum(step["policy"] for step in steps) / total,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
