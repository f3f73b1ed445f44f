"""Reports of heat and residency, their pictures and commands, and paths that cannot be written."""

import json
import logging

import numpy as np
import pytest
from matplotlib import image

from megascale_omni import cli
from megascale_omni.cli import heat as heat_command
from megascale_omni.config import HeatConfig, ObserveConfig
from megascale_omni.heat.observation import Observation, check_paths, draw_report
from megascale_omni.heat.report import read_report
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import PagingOptions
from scripts.measurements.paging_model import Model, Task, Trained, batches_of
from tests.unit.heat.test_heat import QUICK, Kept
from tests.unit.paging.small import Pages


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    task = Task(steps=8, modules=2, experts=8, active=2)
    with batches_of(task):
        options = PagingOptions(device_budget=Budget(fraction=0.5), disk_path=folder)
        model = Model(task, options)
        heat = HeatConfig(refresh_steps=2, window_steps=4, cold_steps=1)
        observation = Observation(model.manager, heat=heat, observe=ObserveConfig(report=str(folder / "run")))
        for number in range(1, task.steps + 1):
            model.step(number, Trained())
        observation.close()
        observation.close()
        counts = model.manager.stats()
        model.manager.close()
    return folder / "run", counts


def test_a_report_tells_every_step_and_every_look(report):
    folder, counts = report
    (found,) = read_report(folder)
    assert [line["step"] for line in found.steps] == list(range(1, 8))
    assert [line["step"] for line in found.heat] == [2, 4, 6, 7], "the last one tells of the end"
    assert [m["path"] for m in found.modules] == ["layers.0.experts", "layers.1.experts"]
    assert all(len(states) == 8 for line in found.heat for states in line["states"])
    assert found.limit_bytes
    for line in found.steps:
        assert line["tiers"]["device"] == sum(line["planes"].values()) <= found.limit_bytes
    assert 0 < found.steps[-1]["counts"]["bytes_loaded"] <= counts["bytes_loaded"]


@pytest.mark.parametrize("name", ["heat.png", "residency.png"])
def test_pictures_are_drawn_at_the_end(report, name):
    pixels = image.imread(report[0] / name)
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("command", ["heat", "residency"])
def test_commands_print_and_draw(report, command, tmp_path, capsys):
    png = tmp_path / "a.png"
    assert cli.main([command, str(report[0]), "--png", str(png)]) == 0
    assert image.imread(png).size
    text = capsys.readouterr().out
    assert "layer 1:" in text if command == "heat" else "page faults:" in text


@pytest.mark.parametrize(
    ("experts", "state", "told"),
    [
        ([2, 5], "hot", "2 hot (2 5)"),
        ([], "frozen", "0 frozen"),
        ([0, 1], "warm", "2 warm"),
        (range(17), "cold", "17 cold"),
    ],
)
def test_a_short_list_of_experts_is_named(experts, state, told):
    assert heat_command._told(experts, state) == told


def _begin_with(path, line):
    rest = path.read_text().splitlines()[1:]
    path.write_text("\n".join([json.dumps(line), *rest]) + "\n")


def test_reports_of_several_ranks_are_shown_together(report, tmp_path, capsys):
    for rank in range(2):
        (tmp_path / f"rank{rank}.jsonl").write_text((report[0] / "rank0.jsonl").read_text())
        _begin_with(tmp_path / f"rank{rank}.jsonl", {"kind": "begin", "world": 2})
    assert cli.main(["heat", str(tmp_path)]) == 0
    assert "rank 1, layer 0:" in capsys.readouterr().out
    assert len(draw_report(tmp_path)) == 2


def test_a_report_of_a_run_that_died_is_read_up_to_there(report, tmp_path):
    text = (report[0] / "rank0.jsonl").read_text()
    (tmp_path / "rank0.jsonl").write_text(text[:-20])
    (found,) = read_report(tmp_path)
    assert len(found.steps) + len(found.heat) == sum("states" in x or "tiers" in x for x in text.splitlines()) - 1
    (tmp_path / "rank0.jsonl").write_text("nonsense\n" + text)
    with pytest.raises(ValueError, match=r"rank0.jsonl, line 1, is no line of a report"):
        read_report(tmp_path)


def test_what_is_no_report_or_too_short_a_one_is_refused(tmp_path, capsys):
    assert cli.main(["heat", str(tmp_path)]) == 1
    assert "holds no report of a run; make one with --megascale-report FOLDER" in capsys.readouterr().err
    (tmp_path / "rank0.jsonl").write_text(json.dumps({"kind": "run", "modules": [], "limit_bytes": None}) + "\n")
    assert cli.main(["heat", str(tmp_path)]) == 1
    assert cli.main(["residency", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("the run ended before") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trace": "none/t"}, r"observe\.trace=.*none/t cannot be written: there is no folder .*none; make it"),
        ({"trace": "."}, r"observe\.trace=.* is a folder; name a file in it \(--megascale-trace\)"),
        ({"trace": "file/t"}, r"there is no folder .*file"),
        ({"report": "file"}, r"observe\.report=.*file cannot be made: .*file is a file; give another folder"),
        ({"report": "file/deeper/r"}, r"cannot be made: .*file is a file"),
        ({"report": "taken"}, r"heat\.png in it is a folder; remove it"),
    ],
)
def test_what_cannot_be_written_is_said_before_training(tmp_path, options, message):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "heat.png").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    observe = ObserveConfig(**{key: str(tmp_path / value) for key, value in options.items()})
    pages = Pages(tmp_path, slots=6)
    with pytest.raises(ValueError, match=message):
        Observation(pages.manager, heat=HeatConfig(), observe=observe)
    assert not pages.manager.observers
    assert sorted(tmp_path.rglob("*")) == before, "nothing was made"


def test_a_folder_without_permission_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("megascale_omni.heat.observation.os.access", lambda path, mode: False)
    for observe in (ObserveConfig(trace=str(tmp_path / "t")), ObserveConfig(report=str(tmp_path / "new" / "r"))):
        with pytest.raises(ValueError, match=rf"cannot be written: no permission to write in {tmp_path}"):
            check_paths(observe)


def test_a_picture_that_cannot_be_drawn_at_the_end_is_told_in_the_log(tmp_path, caplog):
    kept = Kept(tmp_path)
    observation = Observation(kept.pages.manager, heat=QUICK, observe=ObserveConfig(report=str(tmp_path / "r")))
    for _ in range(4):
        kept.step([0, 1])
    (tmp_path / "r" / "heat.png").mkdir()
    with caplog.at_level(logging.ERROR):
        observation.close()
    (record,) = caplog.records
    assert "heat.png cannot be written" in record.message
    assert "draw it again: megascale heat" in record.message
