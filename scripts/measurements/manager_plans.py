"""The planner's word beside what trainings do: bytes and seconds of a step in six configurations."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.comparison.presets import page_size_bytes, preset_path
from scripts.measurements.manager_costs import WARMUP_STEPS, Cost, measure
from scripts.measurements.rows import Context
from scripts.measuring.processes import ROOT
from scripts.measuring.progress import say

CONFIGURATIONS = (
    ("quickstart", 100),
    ("quickstart", 25),
    ("coarse", 100),
    ("coarse", 25),
    ("fine", 100),
    ("fine", 50),
)
"""Preset, and per cent of its pages that have room in memory."""

_PAGE_BYTES = {"quickstart": 2**20}
_STEPS = 9
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Beside:
    """Of one configuration: what the planner said and what a training did. Relative deviations.

    ``bytes_off``: the worst of all pages, the device's part, and what lasts from step to step, by plane where all is
    resident.
    """

    cost: Cost
    bytes_off: float
    moved_off: float
    time_off: float
    """Of the measured time."""


def page_bytes(preset: str) -> int:
    """Weight bytes of a page in a preset."""
    return _PAGE_BYTES.get(preset) or page_size_bytes(preset) or 16 * 2**20


def compare(context: Context, preset: str, percent: int) -> Beside:
    """Plans and trains a configuration; once a run of the measurements."""
    return context.once(("beside", preset, percent), lambda: _compare(context.data_path, preset, percent))


def _compare(data_path: Path, preset: str, percent: int) -> Beside:
    with tempfile.TemporaryDirectory(prefix="megascale-plan-", dir=ROOT) as folder:
        planned = plan(preset, percent, folder)
        flags = ["--yaml-cfg", str(preset_path(preset)), "--data-path", str(data_path), "--no-progress", "--megascale"]
        flags += ["--train-iters", str(_STEPS), "--eval-iters", "0", "--megascale-page-size", str(page_bytes(preset))]
        flags += ["--megascale-report", f"{folder}/report", "--metrics-jsonl", f"{folder}/metrics.jsonl"]
        flags += ["--megascale-device-budget", f"{percent}%", "--megascale-disk-path", folder]
        cost = measure(flags)
        steps = _report(Path(folder) / "report")
        start = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[0])["paging"]
    predicted = planned["prediction"]
    last, before = steps[-1], steps[WARMUP_STEPS - 1]
    total, tiers = planned["total_page_bytes"], planned["tier_bytes"]
    pairs = [(total, start["state_bytes"]), (tiers["device"], start["device_bytes"])]
    # After a step gradients are gone, and of every other plane all pages are there, in one tier or another.
    lasting = total - planned["plane_bytes"]["gradient"]
    pairs.append((lasting, sum(last["tiers"].values()) - last["planes"]["gradient"]))
    if percent == 100:
        planes = {name: nbytes for name, nbytes in planned["plane_bytes"].items() if name != "gradient"}
        pairs += [(nbytes, last["planes"][name]) for name, nbytes in planes.items()]
    bytes_off = max(_off(expected, found, of=total) for expected, found in pairs)
    moved = [
        (last["counts"].get(name, 0) - before["counts"].get(name, 0)) / (len(steps) - WARMUP_STEPS)
        for name in ("bytes_loaded", "bytes_written")
    ]
    wanted = predicted["loaded_bytes"] + predicted["written_bytes"]
    moved_off = _off(wanted, sum(moved), of=sum(moved)) if sum(moved) or wanted else 0.0
    time_off = _off(predicted["step_seconds"], cost.step_seconds, of=cost.step_seconds)
    say(
        f"    {preset} at {percent} %: {predicted['step_seconds']:.3f} s planned, {cost.step_seconds:.3f} s measured; "
        f"loaded {predicted['loaded_bytes'] / 2**20:.0f} and {moved[0] / 2**20:.0f} MiB, "
        f"written {predicted['written_bytes'] / 2**20:.0f} and {moved[1] / 2**20:.0f} MiB; passes "
        f"{predicted['passes']}, optimizer {predicted['optimizer']}; heat {cost.heat_share:.4f}, "
        f"policy {cost.policy_share:.4f} of a step"
    )
    return Beside(cost, bytes_off, moved_off, time_off)


def plan(preset: str, percent: int, folder: str) -> dict[str, Any]:
    """What ``megascale plan`` says about this machine, as a user would ask."""
    command = [sys.executable, "-c", "import sys; from megascale_omni.cli import main; sys.exit(main())", "plan"]
    command += f"--json --device here --disk-bandwidth auto --page-size {page_bytes(preset)}".split()
    command += ["--from", str(preset_path(preset)), "--disk-path", folder, "--budget", f"{percent}%"]
    found: dict[str, Any] = json.loads(_output(command))
    return found


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _report(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "step"]


def _off(planned: float, found: float, *, of: float) -> float:
    return abs(planned - found) / of if of else float(planned != found)
