"""What others do to a folder while a run saves to it: fill its disk, remove it, save to it as well."""

import logging
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megascale_omni.checkpoint.boxes import whole
from megascale_omni.checkpoint.checkpointer import Checkpointer, RankState, SaveError, SaveRequest, writes_announced
from megascale_omni.checkpoint.dense import TensorPiece
from megascale_omni.checkpoint.folder_lock import FolderLock
from megascale_omni.checkpoint.journal import Journal
from megascale_omni.checkpoint.manifest import verify
from megascale_omni.checkpoint.store import list_checkpoints
from tests.unit.checkpoint.runs import touched
from tests.unit.checkpoint.test_beside import TIMEOUT_SECONDS, SlowFiles, assert_same, at_step, load


def tags(root: Path) -> set[str]:
    found, broken = list_checkpoints(root)
    assert broken == []
    assert all(verify(f.folder) == [] for f in found)
    return {f.manifest.tag for f in found}


@pytest.mark.parametrize("tag", ["t3", "other"])
def test_of_two_runs_that_save_to_one_folder_the_second_is_refused(tmp_path, tag):
    run, files = at_step(3), SlowFiles(stop_at=5)
    first, second = Checkpointer(tmp_path, files=files), Checkpointer(tmp_path)
    assert first.save_beside(run.state(), SaveRequest(tag="t3", step=3)) is None
    assert files.reached.wait(TIMEOUT_SECONDS)
    with pytest.raises(SaveError, match=r"another run is saving to .*; give each run a folder of its own"):
        second.save(at_step(4).state(), SaveRequest(tag=tag, step=4))
    told = second.save_beside(at_step(4).state(), SaveRequest(tag=tag, step=4))
    assert told is not None
    assert "another run is saving" in told
    files.go.set()
    assert first.finish() is None
    assert tags(tmp_path) == {"t3"}
    assert_same(load(tmp_path), run)
    second.save(at_step(4).state(), SaveRequest(tag=tag, step=4))
    assert tags(tmp_path) == {"t3", tag}
    assert_same(load(tmp_path), at_step(4))
    first.close()


def test_a_failed_save_gives_the_folder_back(tmp_path):
    files = SlowFiles(stop_at=5, fail=True)
    files.go.set()
    with pytest.raises(SaveError, match="Input/output error"):
        Checkpointer(tmp_path, files=files).save(at_step(2).state(), SaveRequest(tag="t2", step=2))
    with pytest.raises(SaveError, match="cannot name"):
        Checkpointer(tmp_path).save(at_step(2).state(), SaveRequest(tag=".t2", step=2))
    Checkpointer(tmp_path).save(at_step(2).state(), SaveRequest(tag="t2", step=2))
    assert tags(tmp_path) == {"t2"}


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    program = (
        "import pathlib, sys, time; from megascale_omni.checkpoint.folder_lock import FolderLock; lock = FolderLock();"
        "lock.acquire(pathlib.Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        lock = FolderLock()
        with pytest.raises(ValueError, match="another run"):
            lock.acquire(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    lock.acquire(tmp_path)
    lock.release()


def test_a_folder_removed_between_saves_is_made_anew_with_a_whole_checkpoint(tmp_path, caplog):
    root = tmp_path / "store"
    run, checkpoints = at_step(3), Checkpointer(root)
    checkpoints.save(run.state(), SaveRequest(tag="t3", step=3))
    run.step(4, touched(4))
    checkpoints.save(run.state(), SaveRequest(tag="t4", step=4, full=False))
    assert list_checkpoints(root)[0][0].manifest.kind == "increment"
    shutil.rmtree(root / "t3")  # what the base needs
    run.step(5, touched(5))
    checkpoints.save(run.state(), SaveRequest(tag="t5", step=5, full=False))
    assert list_checkpoints(root)[0][0].manifest.kind == "full"
    assert "no longer has what this run saved or loaded there: t5 is saved whole" in caplog.text
    shutil.rmtree(root)
    run.step(6, touched(6))
    checkpoints.save(run.state(), SaveRequest(tag="t6", step=6, full=False))
    assert tags(root) == {"t6"}
    assert_same(load(root), at_step(6))


def test_a_folder_removed_during_a_save_fails_it_and_training_goes_on(tmp_path):
    root, run, files = tmp_path / "store", at_step(3), SlowFiles(stop_at=5)
    checkpoints = Checkpointer(root, files=files)
    with writes_announced(checkpoints, run.state().experts):
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t3", step=3)) is None
        assert files.reached.wait(TIMEOUT_SECONDS)
        shutil.rmtree(root)
        files.go.set()
        checkpoints.before_step()
        run.step(4, touched(4))
        told = checkpoints.finish()
        assert told is not None
        assert "t3 could not be written: FileNotFoundError" in told
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t4", step=4, full=False)) is None
        assert checkpoints.finish() is None
    assert tags(root) == {"t4"}
    assert_same(load(root), at_step(4))
    checkpoints.close()


@contextmanager
def files_of_at_most(nbytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [1 << 20, (1 << 20) + 1000])
def test_a_disk_that_is_full_fails_the_save_and_nothing_else(tmp_path, limit):
    tensor = torch.randn(1 << 20)

    def state() -> RankState:
        return RankState([TensorPiece("x", (1 << 20,), whole((1 << 20,)), tensor)])

    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(state(), SaveRequest(tag="before", step=1))
    with files_of_at_most(limit), pytest.raises(SaveError, match=r"could not be written: OSError: \[Errno 27\]"):
        checkpoints.save(state(), SaveRequest(tag="full", step=2))
    assert {path.name for path in tmp_path.iterdir()} == {"before", "latest"}
    checkpoints.save(state(), SaveRequest(tag="after", step=3))
    assert tags(tmp_path) == {"before", "after"}


def test_a_journal_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    root = tmp_path / "store"
    journal = Journal(root, layout={})
    with caplog.at_level(logging.ERROR):
        root.write_text("a file where the folder was")
        for step in (1, 2):
            journal.record(step, loss=1.0, learning_rate=0.1, position=step)
        assert caplog.text.count("cannot be written") == 1
        root.unlink()
        journal.record(3, loss=1.0, learning_rate=0.1, position=3)
        (root / "journal.jsonl").write_bytes((root / "journal.jsonl").read_bytes() + b"\xff torn")
        again = Journal(root, layout={})
        again.record(3, loss=1.0, learning_rate=0.1, position=3)
    assert again.replayed == 1
    assert again.differing == []
