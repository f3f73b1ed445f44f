"""``megascale checkpoint``: what it says about whole and damaged checkpoints."""

import json
import shutil

import pytest

from megascale_omni import cli
from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from tests.integration.megatron_ext.stored import contents, different
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
    assert lines[0].endswith("1 rank  needs t3")


def test_show(store, capsys):
    text = said(capsys, "show", store / "t4")
    assert "experts layers.0.experts: 4 of hidden 24, 40 neurons, in 12 pages, " in text
    assert "of them behind the optimizer's 4 steps, by up to 4" in text
    assert (
        text.index("experts layers.0") < text.index("tensor dense: F32 [6, 5] in 1 part") < text.index("file mpu_001")
    )
    assert said(capsys, "show", store) == text
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
    assert said(capsys, "gc", store) == "nothing to remove: the 2 newest and what they need are all there is\n"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_increment_is_made_whole(store, tmp_path_factory, capsys, elsewhere):
    """In its place, or alone in another folder; steps that pages have missed are still to be made."""
    target = tmp_path_factory.mktemp("other") if elsewhere else store
    before = contents(store, "t4")
    assert said(capsys, "convert", store / "t4", target, "--to", "paged") == f"{target / 't4'}\n"
    if not elsewhere:
        said(capsys, "gc", store)
        assert sorted(p.name for p in store.iterdir() if p.is_dir()) == ["t3", "t4"]
        shutil.rmtree(store / "t3")
    assert (target / "latest").read_text() == "t4\n"
    assert "t4: whole" in said(capsys, "verify", target)
    assert said(capsys, "ls", target).startswith("t4  step 4  full ")
    assert different(before, contents(target)) == []
    assert len({int(tensor) for name, tensor in before.items() if name.endswith("last_step")}) > 1


def test_what_others_need_stays_as_it_is(store, tmp_path, capsys):
    assert cli.main(["checkpoint", "convert", str(store / "t3"), str(store), "--to", "paged"]) == 1
    assert "t3 is needed as it is by t4; make the newest of these whole instead" in capsys.readouterr().err
    assert cli.main(["checkpoint", "convert", str(store / "t4"), str(store), "--to", "paged", "--tag", "t2"]) == 1
    assert "t2 is there already; give another folder, or a name with --tag" in capsys.readouterr().err
    cut = ["--to", "paged", "--page-size", "64KiB"]
    assert cli.main(["checkpoint", "convert", str(store / "t4"), str(store), *cut]) == 1
    assert "--page-size has no effect from paged to paged" in capsys.readouterr().err
    assert "damaged" not in said(capsys, "verify", store)
    assert not list(store.glob(".draft*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "nowhere"], "nowhere is not a folder"),
        (["gc", ".", "--keep", "1"], "--keep 1 is too few: at least 2 stay"),
        (["show", "nowhere"], "manifest.json cannot be read"),
        (["verify", "nowhere"], "nowhere is not a folder"),
        (["show", "."], "holds no checkpoints of format paged"),
    ],
)
def test_mistakes(words, message, capsys):
    assert cli.main(["checkpoint", *words]) == 1
    assert message in capsys.readouterr().err
