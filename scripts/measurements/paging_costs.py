"""What paging moves and what waiting costs: bytes by experts hit, and replay of missed steps beside the io it saves."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from megascale_omni.paging.budget import Budget
from megascale_omni.paging.disk import DiskFile
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.paging.planes import Plane
from scripts.measurements.paging_model import Model, Trained
from scripts.measurements.paging_overlap import TASK
from scripts.measuring.progress import say
from scripts.measuring.statistics import summarize

_HIT = replace(TASK, tokens=128, hidden=128, ffn=512)
_WARMUP, _STEPS = 8, 40
_MISSED = 100
_REPETITIONS = 9
_PAGE = replace(_HIT, modules=1, experts=2, active=1, hidden=1024, ffn=1024, rows=1024, max_lag=_MISSED + 1)
"""An expert is a page of 3 million parameters."""


def moved_by(hit: int) -> float:
    """Bytes read and written a step when `hit` of 16 experts, drawn at each step, get tokens; device budget 25 %."""
    task = replace(_HIT, active=hit)
    with tempfile.TemporaryDirectory(prefix="megascale-bytes-") as folder:
        options = PagingOptions(device_budget=Budget(fraction=0.25), disk_path=folder)
        model = Model(task, options, poison=False)
        try:
            before = 0
            for step in range(1, _WARMUP + _STEPS + 1):
                model.step(step, Trained())
                if step == _WARMUP:
                    before = _moved(model)
            return (_moved(model) - before) / _STEPS
        finally:
            model.manager.close()


def _moved(model: Model) -> int:
    disk = model.manager.pager.tiers.disk
    assert disk is not None
    return disk.bytes_read + disk.bytes_written


def hit_share() -> float:
    """P5: bytes moved when 4 of 16 experts are hit, against all 16."""
    few, every = moved_by(4), moved_by(16)
    say(f"    bytes moved a step: 4 of 16 hit {few / 2**20:.1f} MiB, all hit {every / 2**20:.1f} MiB")
    return few / every


def replay_share() -> float:
    """P8: replaying 100 missed steps of a page, against reading and writing its state 100 times."""
    model = Model(_PAGE, PagingOptions(), poison=False)
    experts = model.modules[0]
    replays = []
    for _ in range(_REPETITIONS):
        name = _touch_and_wait(model)
        start = time.perf_counter()
        model.adam.catch_up(experts.pages, experts.page_ids(Plane.WEIGHT, [name]))
        replays.append(time.perf_counter() - start)
    planes = (Plane.WEIGHT, Plane.MOMENT1, Plane.MOMENT2)
    slot_class = experts.pages.slot_class(Plane.WEIGHT)
    with tempfile.TemporaryDirectory(prefix="megascale-replay-") as folder:
        disk = DiskFile(Path(folder))
        disk.reserve(len(planes) * slot_class.nbytes)
        slot = model.manager.arena.tensor(slot_class, model.manager.arena.allocate(slot_class))
        slot.normal_()
        touches = []
        for _ in range(_MISSED):
            start = time.perf_counter()
            for index in range(len(planes)):
                disk.write(index * slot_class.nbytes, slot, name=lambda: "page")
                disk.read(index * slot_class.nbytes, slot, name=lambda: "page")
            touches.append(time.perf_counter() - start)
        disk.close()
    model.manager.close()
    replay, touched = summarize(replays).median, _MISSED * summarize(touches).median
    say(
        f"    a page of {slot_class.nbytes / 2**20:.0f} MiB, {_MISSED} steps: replay {replay:.3f} s, io {touched:.3f} s"
    )
    return replay / touched


def _touch_and_wait(model: Model) -> tuple[int, int]:
    """Steps until a page that has moments is 100 steps behind; its name."""
    experts = model.modules[0]
    generator = torch.Generator().manual_seed(1)
    for expert in (0, *[1] * _MISSED):
        model.gradients.drop()
        counts = [0, 0]
        counts[expert] = 16
        x = torch.randn(16, model.task.hidden, generator=generator, requires_grad=True)
        experts(x, counts, torch.ones(16)).sum().backward()
        model.gradients.finish(scale=1.0)
        model.adam.step()
    behind = model.adam.num_steps - int(model.manager.table.last_step[experts.page_ids(Plane.WEIGHT, [(0, 0)])[0]])
    if behind != _MISSED:
        raise RuntimeError(f"the page is {behind} steps behind, not {_MISSED}")
    return 0, 0
