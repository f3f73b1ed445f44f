"""``megascale checkpoint``: what it says about whole and damaged checkpoints."""

import json

import pytest

from megascale_omni import cli
from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from tests.unit.checkpoint.runs import Layout, Run, touched


@pytest.fixture
def store(tmp_path):
    run, checkpoints = Run(0, Layout()), Checkpointer(tmp_path)
    for number in (1, 2, 3, 4):
        run.step(number, touched(number))
        checkpoints.save(run.state(), SaveRequest(tag=f"t{number}", step=number, full=number % 2 == 1))
    return tmp_path


def said(capsys, *words) -> str:
    assert cli.main(["checkpoint", *map(str, words)]) == 0
    text: str = capsys.readouterr().out
    return text


def test_ls_is_newest_first(store, capsys):
    lines = said(capsys, "ls", store).splitlines()
    assert [line.split()[0] for line in lines] == ["t4", "t3", "t2", "t1"]
    assert "increment" in lines[0]
    assert lines[0].endswith("1 ranks  needs t3")


def test_show(store, capsys):
    text = said(capsys, "show", store / "t4")
    assert "experts layers.0.experts: 4 of hidden 24, 40 neurons, in 12 pages, " in text
    assert "of them behind the optimizer's 4 steps, by up to 4" in text
    assert (
        text.index("experts layers.0") < text.index("tensor dense: F32 [6, 5] in 1 parts") < text.index("file mpu_001")
    )
    assert json.loads(said(capsys, "show", store / "t4", "--json"))["step"] == 4


def test_verify_names_the_file_and_fails(store, capsys):
    assert "t1: whole" in said(capsys, "verify", store)
    path = store / "t2" / "resource_binding.json"
    path.write_text(path.read_text().replace("rank", "rink"))
    assert cli.main(["checkpoint", "verify", str(store)]) == 1
    text = capsys.readouterr().out
    assert "t2: damaged" in text
    assert "resource_binding.json is damaged" in text
    assert cli.main(["checkpoint", "verify", str(store / "t1")]) == 0


def test_gc_keeps_the_newest_and_what_they_need(store, capsys):
    assert "would remove" in said(capsys, "gc", store, "--dry-run")
    assert (store / "t1").exists()
    said(capsys, "gc", store)
    assert sorted(p.name for p in store.iterdir() if p.is_dir()) == ["t3", "t4"]
    assert "t4: whole" in said(capsys, "verify", store)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "nowhere"], "nowhere is not a folder"),
        (["gc", ".", "--keep", "1"], "--keep 1 is too few: at least 2 stay"),
        (["show", "nowhere"], "manifest.json cannot be read"),
    ],
)
def test_mistakes(words, message, capsys):
    assert cli.main(["checkpoint", *words]) == 1
    assert message in capsys.readouterr().err
