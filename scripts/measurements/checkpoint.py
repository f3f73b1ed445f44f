"""Checkpoints: whole or not there, small, beside training, and back in seconds."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import torch

from megascale_omni.checkpoint.boxes import whole
from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveRequest
from megascale_omni.checkpoint.dense import TensorPiece
from megascale_omni.checkpoint.manifest import CheckpointError
from scripts.measurements.checkpoint_disks import DISKS, Crash, RecordingFiles
from scripts.measurements.checkpoint_kills import RUNS, killed_runs
from scripts.measurements.checkpoint_kills import flags_of as flags_of_kill
from scripts.measurements.checkpoint_kills import run as run_killed
from scripts.measurements.checkpoint_model import increment_ratio, memory_ratio
from scripts.measurements.checkpoint_stall import stall
from scripts.measurements.rows import Context, Row
from scripts.measuring.processes import ROOT
from scripts.measuring.progress import say

_CASES = 200
_QUICKSTART = f"--yaml-cfg {ROOT / 'configs/quickstart.yaml'} --eval-iters 0"


def _save(root: Path, number: int, files: RecordingFiles | None = None) -> None:
    tensor = torch.arange(12.0).view(3, 4) + number
    state = RankState([TensorPiece("x", (3, 4), whole((3, 4)), tensor)])
    request = SaveRequest(tag=f"t{number}", step=number, values={"number": number})
    Checkpointer(root, files=files, keep=2).save(state, request)


def _load(root: Path) -> int | None:
    """The number that a store holds, None where its bytes are not those of the number."""
    opened = Checkpointer(root).open()
    if opened is None:
        return None
    number = int(opened.manifest.values["number"])
    return number if torch.equal(opened.dense.read("x"), torch.arange(12.0).view(3, 4) + number) else None


def _lost_after_crashes(context: Context) -> float:
    """R1: moments and disks from which neither the old nor the new checkpoint loads."""
    lost = moments = 0
    with tempfile.TemporaryDirectory(prefix="megascale-crashes-") as folder:
        while True:
            moments += 1
            root = Path(folder) / f"{moments}"
            root.mkdir()
            for number in (1, 2, 3):
                _save(root, number)
            files = RecordingFiles(root, crash_after=moments)
            try:
                _save(root, 9, files)
            except Crash:
                pass
            else:
                break
            for disk in DISKS:
                left = Path(folder) / disk
                files.leave(disk, left)
                lost += _load(left) not in (3, 9)
    say(f"    {moments - 1} operations, {len(DISKS)} disks each")
    return float(lost)


def _unnamed_damage(context: Context) -> float:
    """R7: damaged checkpoints that load, or whose message does not name the file."""
    chance, wrong = random.Random(7), 0
    with tempfile.TemporaryDirectory(prefix="megascale-damage-") as folder:
        source = Path(folder) / "source"
        _save(source, 1)
        paths = sorted(p.relative_to(source) for p in (source / "t1").rglob("*") if p.is_file())
        for case in range(_CASES):
            root = Path(folder) / "case"
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(source, root)
            damaged, other = chance.sample(paths, 2)
            _damage(case % 4, root / damaged, root / other, chance)
            try:
                opened = Checkpointer(root).open()
            except CheckpointError as error:
                wrong += damaged.relative_to("t1").as_posix() not in str(error) and "manifest.json" not in str(error)
            else:
                wrong += opened is not None
    return float(wrong)


def _damage(kind: int, path: Path, other: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == 0:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif kind == 1:
        path.write_bytes(data[: chance.randrange(len(data))])
    elif kind == 2:
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)


def _equal_after_kills(context: Context) -> float:
    """R2: runs that came back after a kill and ended with the losses of one that was left alone."""
    return float(sum(run.ended and run.equal for run in killed_runs(context.data_path)))


def _seconds_to_next_step(context: Context) -> float:
    """R3: from the kill of rank 1 to the next step, on 2 ranks of the quickstart model."""
    with tempfile.TemporaryDirectory(prefix="megascale-recovery-") as folder:
        model = f"{_QUICKSTART} --train-iters 120 --micro-batch-size 4 --save-interval 5"
        flags = flags_of_kill(model, 2, context.data_path, Path(folder) / "run")
        ended, struck, seconds = run_killed(flags, 2, kill=(25.0, 1))
    if not (ended and struck and seconds is not None):
        raise RuntimeError(f"the run ended well: {ended}; the kill struck: {struck}; then a step came: {seconds}")
    return seconds


def _stall(context: Context) -> float:
    """R4: the price of a save beside training, call, writing and making it count, in steps."""
    with tempfile.TemporaryDirectory(prefix="megascale-stall-") as folder:
        found = stall(context.data_path, Path(folder) / "run")
    say("    " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    return found["steps"]


def _in_folder(context: Context, measure: object) -> float:
    assert callable(measure)
    with tempfile.TemporaryDirectory(prefix="megascale-checkpoint-") as folder:
        return float(measure(Path(folder)))


ROWS: tuple[Row, ...] = (
    Row(
        "R1",
        "crash after every file operation of a save: disks that load neither",
        "",
        "at_most",
        0,
        _lost_after_crashes,
    ),
    Row("R2", f"of {RUNS} runs with a rank killed: back with equal losses", "", "at_least", RUNS, _equal_after_kills),
    Row("R3", "kill to next step, 2 ranks, quickstart", "s", "at_most", 30, _seconds_to_next_step, 8),
    Row("R4", "stall of training by a save beside it, quickstart", "steps", "at_most", 0.05, _stall, 0.01),
    Row(
        "R5",
        "increment with a tenth of the pages changed / full",
        "x",
        "at_most",
        0.12,
        lambda context: _in_folder(context, increment_ratio),
    ),
    Row(
        "R6",
        "memory above training's during a save / bytes saved",
        "x",
        "at_most",
        0.1,
        lambda context: _in_folder(context, memory_ratio),
        0.02,
    ),
    Row("R7", f"of {_CASES} damaged checkpoints: loaded, or not named", "", "at_most", 0, _unnamed_damage),
)
