"""A crash after any operation of a save leaves the old or the new checkpoint, and a disk on which saves work."""

import shutil
from pathlib import Path

import pytest
import torch

from megascale_omni.checkpoint.boxes import whole
from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveError, SaveRequest
from megascale_omni.checkpoint.compact import make_whole
from megascale_omni.checkpoint.dense import TensorPiece
from megascale_omni.checkpoint.filesystem import LocalFileSystem
from megascale_omni.checkpoint.store import list_checkpoints
from scripts.measurements.checkpoint_disks import DISKS, Crash, RecordingFiles
from tests.integration.megatron_ext.stored import contents, different
from tests.unit.checkpoint.runs import Layout, Run, touched

VALUES = torch.arange(12.0).view(3, 4)


def state(number: float) -> tuple[RankState, torch.Tensor]:
    tensor = VALUES + number
    return RankState([TensorPiece("x", (3, 4), whole((3, 4)), tensor)]), tensor


def save(root: Path, number: int, tag: str, files=None, keep: int | None = 2) -> None:
    request = SaveRequest(tag=tag, step=number, values={"number": number})
    Checkpointer(root, files=files, keep=keep).save(state(number)[0], request)


def load(root: Path) -> int:
    checkpoints = Checkpointer(root)
    opened = checkpoints.open()
    assert opened is not None
    target, tensor = state(-1.0)
    checkpoints.load(opened, target)
    number = int(opened.manifest.values["number"])
    assert torch.equal(tensor, VALUES + number)
    return number


def crashes(folder: Path, *, tag: str, before: int) -> tuple[int, set[tuple[str, int]]]:
    """Crashes after each operation of a save over ``before`` older ones; how many, and what was loaded after them."""
    outcomes: set[tuple[str, int]] = set()
    number = 0
    while True:
        number += 1
        root = folder / str(number) / "store"
        root.mkdir(parents=True)
        for old in range(1, before + 1):
            save(root, old, f"t{old}")
        files = RecordingFiles(root, crash_after=number)
        try:
            save(root, 9, tag, files)
        except Crash:
            assert len(files.operations) == number, "the fault struck"
        else:
            return number - 1, outcomes
        for disk in DISKS:
            left = folder / str(number) / disk
            files.leave(disk, left)
            found = load(left)
            assert found in (before, 9), f"{disk} disk after {files.operations[-1]}"
            outcomes.add((disk, found))
            save(left, 10, "t10")
            assert load(left) == 10
            assert list_checkpoints(left)[0][0].manifest.tag == "t10"
            assert not [path for path in left.iterdir() if path.name.startswith((".draft", ".trash"))]


@pytest.mark.parametrize("tag", ["t9", "t3"], ids=["a new tag", "the newest one's tag"])
def test_old_or_new_after_every_operation(tmp_path, tag):
    count, outcomes = crashes(tmp_path, tag=tag, before=3)
    assert count > 25
    assert outcomes >= {("all", 3), ("all", 9), ("least", 3), ("least", 9), ("torn", 3), ("torn", 9)}


def test_the_first_checkpoint_is_whole_or_not_there(tmp_path):
    for crash_after in range(1, 60):
        root = tmp_path / str(crash_after)
        root.mkdir()
        files = RecordingFiles(root, crash_after=crash_after)
        try:
            save(root, 1, "t1", files)
        except Crash:
            pass
        else:
            break
        for disk in DISKS:
            left = tmp_path / f"{crash_after}-{disk}"
            files.leave(disk, left)
            opened = Checkpointer(left).open()
            assert opened is None or opened.manifest.tag == "t1"
    assert crash_after > 15


def test_what_a_run_has_replaced_meanwhile_is_not_made_whole(tmp_path):
    run, checkpoints = Run(0, Layout()), Checkpointer(tmp_path)
    checkpoints.save(run.state(), SaveRequest(tag="t", step=0))
    opened = Checkpointer(tmp_path).open("t")
    assert opened is not None
    run.step(1, touched(1))
    checkpoints.save(run.state(), SaveRequest(tag="t", step=1))
    expected = contents(tmp_path)
    with pytest.raises(ValueError, match="t is another checkpoint by now"):
        make_whole(opened, tmp_path)
    assert different(expected, contents(tmp_path)) == []
    assert not list(tmp_path.glob(".draft*"))


def test_a_crash_while_an_increment_is_made_whole_loses_nothing(tmp_path):
    source, run = tmp_path / "source", Run(0, Layout())
    checkpoints = Checkpointer(source)
    for number in (1, 2):
        run.step(number, touched(number))
        checkpoints.save(run.state(), SaveRequest(tag=f"t{number}", step=number, full=number == 1))
    expected, kinds = contents(source), set()
    for crash_after in range(1, 200):
        root = tmp_path / str(crash_after)
        shutil.copytree(source, root)
        opened, files = Checkpointer(root).open("t2"), RecordingFiles(root, crash_after=crash_after)
        assert opened is not None
        try:
            make_whole(opened, root, files=files)
        except Crash:
            pass
        else:
            break
        for disk in DISKS:
            left = tmp_path / f"{crash_after}-{disk}"
            files.leave(disk, left)
            assert different(expected, contents(left)) == [], f"{disk} disk after {files.operations[-1]}"
            found = list_checkpoints(left)[0]
            assert found[0].manifest.tag == "t2"
            kinds.add(found[0].manifest.kind)
    assert crash_after > 20
    assert kinds == {"increment", "full"}


class FailingFiles(LocalFileSystem):
    """Has no space left when the ``fail_at``-th file is made."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at
        self.failed = False

    def create(self, path: Path):
        self.left -= 1
        if self.left == 0:
            self.failed = True
            raise OSError(28, "No space left on device", str(path))
        return super().create(path)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4, 5])
def test_an_error_leaves_what_was_there(tmp_path, fail_at):
    save(tmp_path, 1, "t1")
    files = FailingFiles(fail_at)
    with pytest.raises(SaveError, match="No space left on device"):
        save(tmp_path, 2, "t2", files)
    assert files.failed
    assert load(tmp_path) == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_newest_stay_and_the_tracker_names_the_last(tmp_path):
    for number in range(1, 6):
        save(tmp_path, number, f"t{number}", keep=3)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["t3", "t4", "t5"]
    assert (tmp_path / "latest").read_text() == "t5\n"
    save(tmp_path, 6, "t6", keep=0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["t5", "t6"], "two stay at least"


def test_the_newest_is_the_last_saved_not_the_highest_step(tmp_path):
    save(tmp_path, 5, "t5")
    save(tmp_path, 3, "t3")
    assert load(tmp_path) == 3


@pytest.mark.parametrize("tag", ["", ".hidden", "a/b", "t.replaced"])
def test_tags_that_cannot_name_a_folder_are_refused(tmp_path, tag):
    with pytest.raises(SaveError, match="cannot name a checkpoint's folder"):
        save(tmp_path, 1, tag)
