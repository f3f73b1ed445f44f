"""No damaged checkpoint is loaded: what is wrong is named, and an older whole one is taken instead."""

import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from megascale_omni.checkpoint import opening
from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveRequest
from megascale_omni.checkpoint.manifest import MANIFEST, CheckpointError, verify
from tests.unit.checkpoint.runs import Layout, Run, touched


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Two checkpoints, the newer an increment of the older."""
    root = tmp_path_factory.mktemp("store")
    run = Run(0, Layout())
    checkpoints = Checkpointer(root)
    for number in (1, 2):
        run.step(number, touched(number))
        checkpoints.save(run.state(), SaveRequest(tag=f"t{number}", step=number, full=number == 1))
    return root


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def lose(path: Path, chance: random.Random) -> None:
    path.unlink()


def grow(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("damage", [flip, truncate, lose, grow])
def test_every_file_is_named(store, tmp_path, damage):
    chance = random.Random(3)
    count = len(files_of(store / "t1"))
    assert count >= 7
    for number in range(count):
        root = tmp_path / str(number)
        shutil.copytree(store, root)
        path = files_of(root / "t1")[number]
        damage(path, chance)
        name = path.relative_to(root / "t1").as_posix()
        with pytest.raises(CheckpointError) as error:
            Checkpointer(root).open("t1") or pytest.fail("it was opened")
        assert name in str(error.value)


def test_swapped_files_are_named(store, tmp_path):
    paths = [path.relative_to(store / "t1") for path in files_of(store / "t1")]
    for number, (one, other) in enumerate(pairwise(paths)):
        root = tmp_path / str(number)
        shutil.copytree(store, root)
        first, second = root / "t1" / one, root / "t1" / other
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
        problems = _problems(root / "t1")
        for name in (one, other):
            assert MANIFEST in (str(one), str(other)) or any(name.as_posix() in line for line in problems)
        assert problems


def test_a_manifest_of_another_checkpoint_is_refused(store, tmp_path):
    root = tmp_path / "s"
    shutil.copytree(store, root)
    shutil.copy(root / "t1" / MANIFEST, root / "t2" / MANIFEST)
    assert any("is that of t1" in line for line in _problems(root / "t2"))


def test_a_file_that_nobody_wrote_is_named(store, tmp_path):
    root = tmp_path / "s"
    shutil.copytree(store, root)
    (root / "t1" / "mpu_001_dense_state" / "more.json").write_text("[]")
    assert _problems(root / "t1") == ["mpu_001_dense_state/more.json is not in the manifest"]


def test_an_older_one_is_taken_and_the_log_says_why(store, tmp_path, caplog):
    root = tmp_path / "s"
    shutil.copytree(store, root)
    flip(root / "t2" / "mpu_002_experts_state" / "00000.safetensors", random.Random(1))
    opened = Checkpointer(root).open()
    assert opened is not None
    assert opened.manifest.tag == "t1"
    assert "passed over" in caplog.text
    assert "mpu_002_experts_state/00000.safetensors is damaged (xxh3_128" in caplog.text
    flip(root / "t1" / MANIFEST, random.Random(2))
    with pytest.raises(CheckpointError) as error:
        Checkpointer(root).open()
    assert "none that can be loaded: t1, t2" in str(error.value)
    assert str(error.value).count("manifest.json") == 1, "t2 needs t1: once is enough"


def test_a_load_gives_up_after_many_and_says_what_it_did_not_try(store, tmp_path, monkeypatch):
    root = tmp_path / "s"
    shutil.copytree(store, root)
    flip(root / "t2" / "mpu_001_dense_state" / "00000.safetensors", random.Random(1))
    monkeypatch.setattr(opening, "MOST_PASSED_OVER", 1)
    with pytest.raises(CheckpointError, match="none that can be loaded: t2; older ones were not tried: t1; ask for"):
        Checkpointer(root).open()
    opened = Checkpointer(root).open("t1")
    assert opened is not None


def _problems(folder: Path) -> list[str]:
    try:
        return verify(folder)
    except CheckpointError as error:
        return error.problems
