"""Rows: bounds, selection, what is reported when measuring fails, and the JSON that the command prints."""

import json
import math
import sys
import types
from pathlib import Path

import pytest

from scripts.measurements import house, main
from scripts.measurements.rows import Context, Measured, NotMeasurableError, Row, keeps, measure, select
from scripts.measuring.files import finite, write_json


def row(row_id="X1", *, kind="at_most", bound=1.0, value=0.5, aim=None):
    def made(context):
        if isinstance(value, Exception):
            raise value
        return value

    return Row(id=row_id, what=f"what {row_id} is", unit="x", kind=kind, bound=bound, measure=made, aim=aim)


@pytest.mark.parametrize(
    ("value", "kind", "bound", "kept"),
    [
        (1.0, "at_most", 1.0, True),
        (1.0, "at_least", 1.0, True),
        (1.0000001, "at_most", 1.0, False),
        (0.9999999, "at_least", 1.0, False),
        (math.inf, "at_most", 1.0, False),
        (math.nan, "at_most", 1.0, False),
        (math.nan, "at_least", 1.0, False),
    ],
)
def test_a_bound_is_kept_up_to_and_including_itself(value, kind, bound, kept):
    assert keeps(value, kind, bound) is kept


def test_a_row_in_json_has_exactly_one_bound():
    entry = Measured(row(aim=0.25), 0.5, 1.23456).as_json()
    assert entry == {
        "id": "X1",
        "what": "what X1 is",
        "value": 0.5,
        "unit": "x",
        "at_most": 1.0,
        "aim": 0.25,
        "met": True,
        "seconds": 1.23,
    }
    assert set(Measured(row(kind="at_least"), 0.5, 1.0).as_json()) == set(entry) - {"at_most"} | {"at_least"}


def test_an_aim_decides_nothing():
    assert Measured(row(aim=0.1), 0.5, 1.0).met


def test_a_row_that_fails_is_not_met_and_does_not_stop_the_others(tmp_path):
    failed, fine = measure([row("A", value=RuntimeError("no disk")), row("B")], Context(tmp_path))
    assert failed.value is None
    assert not failed.met
    assert failed.as_json()["error"] == "RuntimeError: no disk"
    assert fine.met


def test_a_row_that_this_machine_cannot_measure_says_so_without_a_traceback(tmp_path, capsys):
    (failed,) = measure([row("A", value=NotMeasurableError("needs a tape drive"))], Context(tmp_path))
    assert not failed.met
    assert failed.as_json()["error"] == "not measurable: needs a tape drive"
    said = capsys.readouterr().err
    assert "not measurable: needs a tape drive" in said
    assert "Traceback" not in said


def test_rows_that_share_a_measurement_make_it_once(tmp_path):
    calls = []
    context = Context(tmp_path)

    def expensive():
        calls.append(1)
        return 0.5

    def shared(context):
        return context.once("key", expensive)

    rows = [Row(name, "", "x", "at_most", 1.0, shared) for name in ("A", "B")]
    assert [measured.value for measured in measure(rows, context)] == [0.5, 0.5]
    assert calls == [1]


def test_rows_that_share_a_measurement_share_its_failure(tmp_path):
    calls = []

    def fails():
        calls.append(1)
        raise RuntimeError("no disk")

    def shared(context):
        return context.once("key", fails)

    rows = [Row(name, "", "x", "at_most", 1.0, shared) for name in ("A", "B")]
    assert [measured.error for measured in measure(rows, Context(tmp_path))] == ["RuntimeError: no disk"] * 2
    assert calls == [1]


def test_rows_are_selected_by_id_or_by_its_beginning():
    rows = [row("H1-a"), row("H1-b"), row("H10-a"), row("H2")]
    assert [chosen.id for chosen in select(rows, ["H1"])] == ["H1-a", "H1-b"]
    assert [chosen.id for chosen in select(rows, ["H2", "H1-b"])] == ["H1-b", "H2"]
    assert select(rows, []) == rows
    with pytest.raises(ValueError, match="no row 'H3'; there are H1-a"):
        select(rows, ["H1", "H3"])


@pytest.fixture
def topic(monkeypatch):
    """A topic of two rows, one of which is not met."""
    module = types.ModuleType("scripts.measurements.sample")
    rows = (row("S1"), row("S2", kind="at_least", bound=2.0, value=math.inf), row("S3", value=3.0))
    monkeypatch.setattr(module, "ROWS", rows, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(main, "topics", lambda: ["sample"])
    monkeypatch.setattr(main, "standard_library_corpus", lambda folder: folder / "corpus.txt")
    return module


def test_the_command_prints_what_it_measured_and_fails_where_a_row_is_not_met(topic, capsys, tmp_path):
    path = tmp_path / "new" / "result.json"
    assert main.main(["sample", "--json", str(path)]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text())
    assert set(printed) == {"topic", "environment", "rows"}
    assert [(r["id"], r["met"], r["value"]) for r in printed["rows"]] == [
        ("S1", True, 0.5),
        ("S2", True, "inf"),
        ("S3", False, 3.0),
    ]
    assert {"cpu", "packages", "date"} <= set(printed["environment"])


def test_the_command_succeeds_where_the_rows_asked_for_are_met(topic, capsys):
    assert main.main(["sample", "--row", "S1", "--row", "S2"]) == 0
    assert [r["id"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["S1", "S2"]


def test_a_file_is_gone_on_with_and_what_it_has_is_not_measured_again(topic, tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    assert main.main(["sample", "--row", "S3", "--json", str(path)]) == 1
    written = []
    monkeypatch.setattr(main, "write_json", lambda path, content: written.append([r["id"] for r in content["rows"]]))
    assert main.main(["sample", "--json", str(path), "--resume"]) == 1, "S3 is still not met"
    assert written == [["S1", "S3"], ["S1", "S2", "S3"]], "after every row, in the topic's order"


def test_a_row_without_a_value_is_measured_again(topic, tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    monkeypatch.setattr(topic, "ROWS", (row("S1", value=RuntimeError("no")), row("S2")))
    assert main.main(["sample", "--json", str(path)]) == 1
    monkeypatch.setattr(topic, "ROWS", (row("S1", value=0.25), row("S2", value=RuntimeError("measured again"))))
    assert main.main(["sample", "--json", str(path), "--resume"]) == 0
    assert [r["value"] for r in json.loads(path.read_text())["rows"]] == [0.25, 0.5]


@pytest.mark.parametrize(("name", "value"), [("topic", "other"), ("megatron_lm", {"release": "1.0"}), ("cpu", "other")])
def test_rows_of_another_run_are_not_mixed_with_these(topic, capsys, tmp_path, name, value):
    path = tmp_path / "result.json"
    main.main(["sample", "--json", str(path)])
    content = json.loads(path.read_text())
    (content["environment"] if name in content["environment"] else content)[name] = value
    path.write_text(json.dumps(content))
    assert main.main(["sample", "--json", str(path), "--resume"]) == 2
    assert name in capsys.readouterr().err
    assert json.loads(path.read_text()) == content


def test_going_on_needs_a_file(topic, capsys):
    assert main.main(["sample", "--resume"]) == 2
    assert "add --json FILE" in capsys.readouterr().err


def test_the_command_refuses_a_row_that_is_not_there(topic, capsys):
    assert main.main(["sample", "--row", "S9"]) == 2
    assert "no row 'S9'" in capsys.readouterr().err


def test_the_house_has_every_row_it_must_reach():
    ids = [row.id for row in house.ROWS]
    assert len(set(ids)) == len(ids)
    assert {row_id.split("-")[0] for row_id in ids} == {"H1", "H2", "H3", "H4", "H5", "H6", "H7"}
    bounds = {row.id: (row.kind, row.bound, row.aim) for row in house.ROWS}
    assert bounds["H4-coarse-fp32-stock"] == ("at_most", 1.0, 0.90)
    assert bounds["H4-fine-bf16-bare"] == ("at_most", 1.40, 1.15)
    assert bounds["H5-fine"] == ("at_most", 0.92, 0.80)
    assert bounds["H6-coarse"] == ("at_most", 1.02, 0.95)
    assert bounds["H7-suite"] == ("at_most", 240, 150)


def test_topics_are_the_modules_that_name_one():
    assert {"checkpoint", "cmsa", "house", "manager", "paging"} <= set(main.topics())


def test_a_result_is_written_whole_with_numbers_that_json_knows(tmp_path: Path):
    path = tmp_path / "result.json"
    write_json(path, {"values": (1.0, math.nan, -math.inf), "deep": [{"x": math.inf}]})
    assert json.loads(path.read_text()) == {"values": [1.0, "nan", "-inf"], "deep": [{"x": "inf"}]}
    assert list(tmp_path.iterdir()) == [path]
    assert finite(2.5) == 2.5
