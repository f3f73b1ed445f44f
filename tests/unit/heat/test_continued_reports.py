"""Reports of runs that are resumed, resized, short, long, or of many experts; and their pictures' numbers."""

import errno
import json
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from matplotlib import image

from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.heat.observation import Observation, draw_report
from megascale_omni.heat.report import of_newest_ranks, read_report
from megascale_omni.heat.states import Heat
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from megascale_omni.pictures.heat import draw_heat, heat_grid, image_of
from megascale_omni.pictures.residency import budgets_of, draw_residency, residency_series
from scripts.measurements.paging_model import Model, Task, Trained, batches_of

TASK = Task(steps=9, modules=2, experts=8, active=2, evaluate=False)
HEAT = HeatConfig(refresh_steps=4, window_steps=8, cold_steps=1)


def run(folder: Path, steps: range, *, sizes: dict[int, float] | None = None, draws: bool = False) -> dict[str, int]:
    """Training steps that are reported, the budget from some steps on another part of all pages; the counters."""
    drawing = nullcontext() if draws else mock.patch("megascale_omni.heat.observation.draw_report")
    with batches_of(TASK), drawing:
        model = Model(TASK, PagingOptions(device_budget=Budget(fraction=0.5), disk_path=folder.parent))
        observation = Observation(model.manager, heat=HEAT, observe=ObserveConfig(report=str(folder)))
        if steps[0] > 1:
            model.manager.schedule.resume_at(steps[0] - 1)
        for step in steps:
            if step in (sizes or {}):
                model.manager.resize(Budget(fraction=(sizes or {})[step]))
            model.step(step, Trained())
            model.manager.schedule.end_step()
        observation.close()
        counts = model.manager.stats()
        model.manager.close()
    return counts


def steps_of(lines: list[dict[str, object]]) -> list[object]:
    return [line["step"] for line in lines]


def test_a_resumed_run_goes_on_in_its_report(tmp_path):
    folder = tmp_path / "run"
    first = run(folder, range(1, 8))
    before = read_report(folder)[0]
    assert steps_of(before.heat) == [4, 7]
    with (folder / "rank0.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # it was killed
    second = run(folder, range(6, 10))
    (after,) = read_report(folder)
    assert steps_of(after.steps) == list(range(1, 10))
    assert after.steps[:5] == before.steps[:5]
    assert steps_of(after.heat) == [4, 8, 9]
    series = residency_series([after])
    made_twice = before.steps[-1]["counts"]["bytes_loaded"] - before.steps[4]["counts"]["bytes_loaded"]
    assert series["loaded"].sum() == first["bytes_loaded"] - made_twice + second["bytes_loaded"]
    assert (series["loaded"] >= 0).all()
    assert len(draw_report(folder)) == 2
    run(folder, range(1, 3))
    assert steps_of(read_report(folder)[0].steps) == [1, 2], "a run from the start begins its report anew"


def test_a_look_just_before_the_first_resumed_step_is_told_once(tmp_path):
    run(tmp_path / "run", range(1, 9))
    run(tmp_path / "run", range(9, 10))
    assert steps_of(read_report(tmp_path / "run")[0].heat) == [4, 8, 9]


def test_budgets_are_drawn_as_they_were_at_each_step(tmp_path):
    run(tmp_path / "run", range(1, 8), sizes={3: 0.25, 6: 0.8})
    reports = read_report(tmp_path / "run")
    series = residency_series(reports)
    limits = series["limit"]
    assert [step for step, _ in budgets_of(series)] == [1, 3, 6]
    assert len(set(limits[:2])) == len(set(limits[2:5])) == len(set(limits[5:])) == 1
    assert limits[2] < limits[0] < limits[5]
    assert (series["device"] <= limits).all()


def test_a_run_of_three_steps_has_both_pictures(tmp_path):
    run(tmp_path / "run", range(1, 4), draws=True)
    (report,) = read_report(tmp_path / "run")
    grid, steps, _ = heat_grid([report])
    assert steps == [3]
    assert (grid[:, 0] == Heat.HOT).any()
    assert image_of(grid, steps, [8, 16])[1] == (0, 3)
    assert all((tmp_path / "run" / name).is_file() for name in ("heat.png", "residency.png"))


def test_a_disk_that_is_full_ends_the_report_and_not_the_run(tmp_path, caplog):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch("megascale_omni.heat.report.length_before", full):
        run(tmp_path / "run", range(1, 4))
    full.assert_called_once()
    assert caplog.text.count("ends here: No space left on device; the run goes on") == 1


def write(folder: Path, rank: int, lines: list[dict[str, object]]) -> None:
    (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(number: int, nbytes: int) -> dict[str, object]:
    counts = {"bytes_loaded": nbytes * number, "emergencies": int(number == 600)}
    return {"kind": "step", "step": number, "step_seconds": 1.0, "tiers": {"device": nbytes}, "counts": counts}


def begin(world: int, limit: int, experts: int = 4) -> list[dict[str, object]]:
    module = {"path": "chunk 0: decoder.layers.0.mlp.experts", "experts": experts}
    return [{"kind": "begin", "world": world}, {"kind": "run", "modules": [module], "limit_bytes": limit}]


def test_a_run_that_went_on_with_fewer_ranks_is_summed_over_those_that_there_were(tmp_path):
    write(tmp_path, 0, [*begin(2, 10), step(1, 7), step(2, 7), *begin(1, 30, 8), step(3, 20)])
    write(tmp_path, 1, [*begin(2, 10), step(1, 8), step(2, 8), step(3, 8)])
    reports = read_report(tmp_path)
    series = residency_series(reports)
    assert series["device"].tolist() == [15, 15, 20]
    assert series["limit"].tolist() == [20, 20, 30]
    assert [report.rank for report in of_newest_ranks(reports)] == [0]


def test_a_step_that_a_rank_has_not_written_is_left_out(tmp_path):
    write(tmp_path, 0, [*begin(2, 10), step(1, 7), step(2, 7)])
    write(tmp_path, 1, [*begin(2, 10), step(1, 8)])
    assert residency_series(read_report(tmp_path))["step"].tolist() == [1]


@pytest.mark.parametrize("steps", [1, 1200])
def test_short_and_long_runs_are_drawn(tmp_path, steps):
    write(tmp_path, 0, [*begin(1, 2**30), *(step(number, 2**29) for number in range(1, steps + 1))])
    draw_residency(read_report(tmp_path), tmp_path / "a.png")
    pixels = (image.imread(tmp_path / "a.png")[..., :3] * 255).round()
    black = np.all(pixels < 40, axis=-1).mean()
    assert 0.001 < black < 0.1, "lines of many steps do not fill the picture"


def test_many_experts_get_a_layer_each_in_which_states_are_in_order(tmp_path):
    layers, experts = 60, 256
    states = np.full((layers, experts), int(Heat.WARM))
    states[:, ::4], states[3, 1::2] = Heat.HOT, Heat.FROZEN
    grid = states.reshape(-1, 1)
    found, _ = image_of(grid, [10], list(range(experts, layers * experts + 1, experts)))
    each = len(found) // layers
    assert found.shape == (layers * each, 10)
    found = found[:, 0]
    shares = (found.reshape(layers, each) == Heat.HOT).mean(axis=1)
    assert np.allclose(shares, 0.25, atol=1 / each)
    assert (np.diff(found.reshape(layers, each)) <= 0).all()
    assert (found.reshape(layers, each)[3] == Heat.FROZEN).mean() == pytest.approx(0.5, abs=1 / each)
    modules = [{"path": f"chunk 0: decoder.layers.{n}.mlp.experts", "experts": experts} for n in range(layers)]
    look = {"kind": "heat", "step": 10, "states": ["".join(map(str, row)) for row in states.tolist()]}
    write(tmp_path, 0, [{"kind": "run", "modules": modules, "limit_bytes": None}, look])
    draw_heat(read_report(tmp_path), tmp_path / "a.png")
    assert image.imread(tmp_path / "a.png").size


def test_looks_at_uneven_steps_are_as_wide_as_what_they_tell_of():
    grid = np.array([[3, 2, 0, 1]])
    found, (left, right) = image_of(grid, [10, 20, 25, 30], [1])
    assert (left, right) == (0, 30)
    assert found[0].tolist() == [3] * 10 + [2] * 10 + [0] * 5 + [1] * 5
