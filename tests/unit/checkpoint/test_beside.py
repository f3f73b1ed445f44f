"""Saves beside training hold what was there when they were asked for; increments hold what has changed since."""

import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

from megascale_omni.checkpoint.checkpointer import Checkpointer, SaveError, SaveRequest, writes_announced
from megascale_omni.checkpoint.filesystem import LocalFileSystem
from megascale_omni.checkpoint.manifest import verify
from megascale_omni.checkpoint.store import list_checkpoints
from megascale_omni.paging.budget import Budget
from megascale_omni.paging.manager import ExpertManager, PagingOptions
from megascale_omni.paging.tiers import DEVICE
from tests.unit.checkpoint.runs import Layout, Run, ThreadRanks, load_newest, touched
from tests.unit.experts.paged import CPU

TIMEOUT_SECONDS = 30.0


class SlowFiles(LocalFileSystem):
    """Stops before the data of the ``stop_at``-th write to a data file until it is let go."""

    def __init__(self, stop_at: int = 1, fail: bool = False) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.left, self.fail = stop_at, fail

    def create(self, path: Path):
        return SlowFile(super().create(path), self, path.suffix == ".safetensors")


class SlowFile:
    def __init__(self, file, files: SlowFiles, slow: bool) -> None:
        self.file, self.files, self.slow = file, files, slow
        self.sync, self.close = file.sync, file.close

    def write(self, *parts) -> None:
        for data in parts:
            if self.slow:
                self.files.left -= 1
                if self.files.left == 0:
                    self.files.reached.set()
                    assert self.files.go.wait(TIMEOUT_SECONDS)
                    if self.files.fail:
                        raise OSError(5, "Input/output error")
            self.file.write(data)


def at_step(steps: int, **options) -> Run:
    run = Run(0, Layout(), **options)
    for number in range(1, steps + 1):
        run.step(number, touched(number))
    return run


def load(root: Path, tag: str | None = None, **options) -> Run:
    run = Run(0, Layout(), seed=99, **options)
    checkpoints = Checkpointer(root)
    load_newest(checkpoints, run, tag=tag)
    return run


def assert_same(run: Run, other: Run) -> None:
    assert run.adam.num_steps == other.adam.num_steps
    assert torch.equal(run.dense, other.dense)
    assert torch.equal(run.flat, other.flat)
    found, expected = run.weights(), other.weights()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("staging_bytes", [1 << 30, 40_000])
@pytest.mark.parametrize("stop_at", [1, 4, 20, 41])
def test_a_save_holds_what_was_there_when_it_was_asked_for(tmp_path, stop_at, staging_bytes):
    run, files = at_step(5), SlowFiles(stop_at)
    checkpoints = Checkpointer(tmp_path, files=files, staging_bytes=staging_bytes)
    with writes_announced(checkpoints, run.state().experts):
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t5", step=5)) is None
        assert files.reached.wait(TIMEOUT_SECONDS)
        assert checkpoints.poll() is None
        assert checkpoints.is_writing
        releaser = threading.Timer(0.05, files.go.set)  # where copies have no room the step waits for the writer
        releaser.start()
        for number in (6, 7):
            checkpoints.before_step()
            run.step(number, {path: [0, 1, 2, 3] for path in touched(1)})
        releaser.join()
        assert checkpoints.finish() is None
    assert not checkpoints.is_writing
    assert checkpoints.last_staged_bytes <= staging_bytes
    assert_same(load(tmp_path), at_step(5))
    checkpoints.close()


def test_there_is_never_a_second_save_under_way(tmp_path):
    run, files = at_step(2), SlowFiles()
    checkpoints = Checkpointer(tmp_path, files=files)
    checkpoints.save_beside(run.state(), SaveRequest(tag="t2", step=2))
    assert files.reached.wait(TIMEOUT_SECONDS)
    threading.Timer(0.05, files.go.set).start()
    assert checkpoints.save_beside(run.state(), SaveRequest(tag="t2b", step=2)) is None
    assert {f.manifest.tag for f in list_checkpoints(tmp_path)[0]} == {"t2"}, "the first one was waited for"
    assert checkpoints.finish() is None
    assert {f.manifest.tag for f in list_checkpoints(tmp_path)[0]} == {"t2", "t2b"}
    checkpoints.close()


def test_a_failure_is_told_later_and_training_goes_on(tmp_path):
    run, files = at_step(3), SlowFiles(stop_at=5, fail=True)
    files.go.set()
    checkpoints = Checkpointer(tmp_path, files=files)
    with writes_announced(checkpoints, run.state().experts):
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t3", step=3)) is None
        checkpoints.before_step()
        run.step(4, touched(4))
        told = checkpoints.finish()
        assert told is not None
        assert "t3 could not be written: OSError: [Errno 5] Input/output error (rank 0)" in told
        assert list_checkpoints(tmp_path)[0] == []
        checkpoints.save(run.state(), SaveRequest(tag="t4", step=4, full=False))
    assert list_checkpoints(tmp_path)[0][0].manifest.kind == "full", "nothing to build an increment on"
    assert_same(load(tmp_path), at_step(4))
    checkpoints.close()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_increments_hold_what_changed_and_load_as_a_whole(tmp_path):
    run, checkpoints = at_step(3), Checkpointer(tmp_path, keep=2)
    checkpoints.save(run.state(), SaveRequest(tag="t3", step=3))
    for number in (4, 5, 6):
        run.step(number, touched(number))
        checkpoints.save(run.state(), SaveRequest(tag=f"t{number}", step=number, full=False))
    found = {f.manifest.tag: f.manifest for f in list_checkpoints(tmp_path)[0]}
    assert set(found) >= {"t3", "t5", "t6"}, "two are kept, and what they need"
    assert found["t6"].kind == "increment"
    assert "t3" in found["t6"].needs
    assert verify(tmp_path / "t6") == []
    assert size(tmp_path / "t6") < size(tmp_path / "t3")
    assert_same(load(tmp_path), at_step(6))
    assert_same(load(tmp_path, "t5"), at_step(5))
    data = bytearray((path := tmp_path / "t3" / "mpu_002_experts_state" / "00000.safetensors").read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert any(line.startswith("needs t3: mpu_002") for line in verify(tmp_path / "t6"))


def test_an_increment_without_changes_holds_no_page(tmp_path):
    run, checkpoints = at_step(3), Checkpointer(tmp_path)
    checkpoints.save(run.state(), SaveRequest(tag="a", step=3))
    checkpoints.save(run.state(), SaveRequest(tag="b", step=3, full=False))
    assert size(tmp_path / "b" / "mpu_002_experts_state") < 100
    assert_same(load(tmp_path), at_step(3))


def test_a_new_run_begins_with_a_full_one(tmp_path):
    run = at_step(2)
    Checkpointer(tmp_path).save(run.state(), SaveRequest(tag="t2", step=2))
    resumed = load(tmp_path)
    Checkpointer(tmp_path).save(resumed.state(), SaveRequest(tag="t2b", step=2, full=False))
    assert list_checkpoints(tmp_path)[0][0].manifest.kind == "full"


RESUMED = {"same": (Layout(), True), "ep2": (Layout(2, ep=2), True), "cut": (Layout(rows=40), False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", RESUMED)
def test_what_a_run_was_resumed_from_is_not_stored_again(tmp_path, case, dtype):
    """In any layout of ranks; pages that are cut otherwise have other bytes and are stored."""
    layout, refers = RESUMED[case]
    Checkpointer(tmp_path).save(at_step(3, dtype=dtype).state(), SaveRequest(tag="t3", step=3))
    ranks = ThreadRanks(layout.world)

    def resumed(rank) -> None:
        run, checkpoints = Run(rank.rank, layout, seed=99, dtype=dtype), Checkpointer(tmp_path, ranks=rank)
        load_newest(checkpoints, run)
        checkpoints.save(run.state(), SaveRequest(tag="t3b", step=3, full=False))
        run.step(4, touched(4))
        checkpoints.save(run.state(), SaveRequest(tag="t4", step=4, full=False))

    ranks.run(resumed)
    manifests = {found.manifest.tag: found.manifest for found in list_checkpoints(tmp_path)[0]}
    assert (manifests["t3b"].kind, set(manifests["t3b"].needs)) == (
        ("increment", {"t3"}) if refers else ("full", set())
    )
    if refers:
        assert size(tmp_path / "t3b" / "mpu_002_experts_state") < 100 * layout.world
        assert "t3" in manifests["t4"].needs
    for tag, steps in (("t3b", 3), ("t4", 4)):
        assert verify(tmp_path / tag) == []
        assert_same(load(tmp_path, tag, dtype=dtype), at_step(steps, dtype=dtype))


def test_a_checkpoint_that_takes_the_place_of_its_base_is_whole(tmp_path, caplog):
    """As the last save of a run does at an iteration that was just saved. What else needed the old one is named."""
    run, checkpoints = at_step(2), Checkpointer(tmp_path)
    for tag, step in (("a", 2), ("a", 2), ("b", 2), ("a", 3)):
        if step > run.adam.num_steps:
            run.step(step, touched(step))
        checkpoints.save(run.state(), SaveRequest(tag=tag, step=step, full=False))
        assert verify(tmp_path / tag) == []
        assert_same(load(tmp_path, tag), at_step(step))
        assert ("b, made from the one before, can no longer be loaded" in caplog.text) == (step == 3)


def test_weights_alone_and_another_folder_are_no_base(tmp_path):
    Checkpointer(tmp_path / "a").save(at_step(3).state(), SaveRequest(tag="t3", step=3))
    for name, folder, with_optimizer in (("weights", "a", False), ("elsewhere", "b", True)):
        run, source = Run(0, Layout(), seed=99), Checkpointer(tmp_path / "a")
        opened = source.open("t3")
        assert opened is not None
        target = source if folder == "a" else Checkpointer(tmp_path / folder)
        target.load(opened, run.state(), with_optimizer=with_optimizer)
        target.save(run.state(), SaveRequest(tag=name, step=3, full=False))
        assert {f.manifest.tag: f.manifest.kind for f in list_checkpoints(tmp_path / folder)[0]}[name] == "full"


@pytest.mark.parametrize("other", ["a save", "a load"])
def test_what_another_folder_has_is_not_looked_for_in_this_one(tmp_path, other):
    """Pages know only whether they have changed since the last checkpoint of any folder."""
    run, here, there = at_step(4), Checkpointer(tmp_path / "a"), Checkpointer(tmp_path / "b")
    there.save(at_step(2).state(), SaveRequest(tag="t2", step=2))
    here.save(run.state(), SaveRequest(tag="t4", step=4))
    if other == "a save":
        run.step(5, touched(5))
        there.save(run.state(), SaveRequest(tag="t5", step=5))
    else:
        load_newest(there, run)
    steps = run.adam.num_steps
    here.save(run.state(), SaveRequest(tag="next", step=steps, full=False))
    assert_same(load(tmp_path / "a", "next"), at_step(steps))


@pytest.mark.parametrize("fail", [False, True])
def test_a_load_waits_for_the_save_under_way(tmp_path, fail, caplog):
    """What is being saved is of the state that is replaced, and no base of what comes after it."""
    Checkpointer(tmp_path).save(at_step(2).state(), SaveRequest(tag="t2", step=2))
    run, files = at_step(4), SlowFiles(stop_at=4, fail=fail)
    checkpoints = Checkpointer(tmp_path, files=files)
    with writes_announced(checkpoints, run.state().experts):
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t4", step=4)) is None
        assert files.reached.wait(TIMEOUT_SECONDS)
        threading.Timer(0.05, files.go.set).start()
        load_newest(checkpoints, run, tag="t2")
        assert not checkpoints.is_writing
        checkpoints.save(run.state(), SaveRequest(tag="next", step=2, full=False))
    checkpoints.close()
    assert ("t4 could not be written: OSError" in caplog.text) == fail
    for tag, steps in {"next": 2, **({} if fail else {"t4": 4})}.items():
        assert_same(load(tmp_path, tag), at_step(steps))


def test_a_folder_that_cannot_be_read_fails_the_save_on_every_rank(tmp_path, monkeypatch):
    ranks = ThreadRanks(2)

    def twice(rank) -> str:
        run, checkpoints = Run(rank.rank, Layout(2, ep=2)), Checkpointer(tmp_path, ranks=rank)
        checkpoints.save(run.state(), SaveRequest(tag="a", step=0))
        monkeypatch.setattr(checkpoints.store, "holds", unreadable)
        with pytest.raises(SaveError, match="Stale file handle") as error:
            checkpoints.save(run.state(), SaveRequest(tag="b", step=0, full=False))
        return str(error.value)

    def unreadable(base) -> bool:
        raise OSError(116, "Stale file handle")

    assert len(set(ranks.run(twice))) == 1


def test_a_base_that_is_gone_meanwhile_is_not_referred_to(tmp_path, caplog):
    Checkpointer(tmp_path).save(at_step(3).state(), SaveRequest(tag="t3", step=3))
    run, checkpoints = Run(0, Layout(), seed=99), Checkpointer(tmp_path)
    load_newest(checkpoints, run)
    shutil.rmtree(tmp_path / "t3")
    checkpoints.save(run.state(), SaveRequest(tag="t3b", step=3, full=False))
    assert "no longer has what this run saved or loaded there: t3b is saved whole" in caplog.text
    assert_same(load(tmp_path), at_step(3))


def test_ranks_fail_together(tmp_path):
    ranks = ThreadRanks(2)

    def work(rank) -> str:
        run = Run(rank.rank, Layout(2, ep=2))
        files = SlowFiles(stop_at=2, fail=rank.rank == 1)
        files.go.set()
        checkpoints = Checkpointer(tmp_path, ranks=rank, files=files)
        with pytest.raises(RuntimeError) as error:
            checkpoints.save(run.state(), SaveRequest(tag="t", step=0))
        return str(error.value)

    first, second = ranks.run(work)
    assert first == second
    assert "Input/output error (rank 1)" in first
    assert list(tmp_path.iterdir()) == []


def paged(scratch: Path, *, host_pages: int = 0) -> Run:
    scratch.mkdir(exist_ok=True)
    options = PagingOptions(
        device_budget=Budget(nbytes=24 * 8192), host_budget=Budget(nbytes=host_pages * 8192), disk_path=scratch
    )
    return Run(0, Layout(), manager=ExpertManager(device=CPU, options=options, poison=True))


@pytest.mark.parametrize("host_pages", [0, 12])
@pytest.mark.parametrize(("stop_at", "staging_bytes"), [(1, 1 << 30), (30, 1 << 30), (30, 40_000), (60, 0)])
def test_pages_that_move_are_saved_beside_training(tmp_path, stop_at, staging_bytes, host_pages):
    """With a budget pages come, go, change and are moved together while the save reads them."""
    run, files = paged(tmp_path / "scratch", host_pages=host_pages), SlowFiles(stop_at)
    for number in range(1, 6):
        run.step(number, touched(number))
    store = tmp_path / "store"
    checkpoints = Checkpointer(store, files=files, staging_bytes=staging_bytes)
    with writes_announced(checkpoints, run.state().experts):
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t5", step=5)) is None
        assert files.reached.wait(TIMEOUT_SECONDS)
        evicted = run.manager.stats()["pages_evicted"]
        releaser = threading.Timer(0.05, files.go.set)  # where copies have no room the step waits for the writer
        releaser.start()
        for number in (6, 7):
            checkpoints.before_step()
            run.step(number, {path: [0, 1, 2, 3] for path in touched(1)})
            run.manager.resize(Budget(nbytes=(64 if number == 6 else 48) * 8192))
        releaser.join()
        assert checkpoints.finish() is None
    assert run.manager.stats()["pages_evicted"] > evicted
    assert checkpoints.last_staged_bytes <= staging_bytes
    run.manager.check_integrity()
    assert_same(load(store), at_step(5))
    other = paged(tmp_path / "other")
    load_newest(checkpoints, other)
    other.manager.check_integrity()
    assert_same(other, at_step(5))
    checkpoints.close()
    run.manager.close()
    other.manager.close()


def test_a_page_that_is_read_stays_where_it_is(tmp_path):
    """A reader on another thread holds a move of its page back, and of no other."""
    run = paged(tmp_path / "scratch")
    run.step(1, touched(1))
    table = run.manager.table
    pages: list[object] = []
    here = (table.tier == DEVICE).nonzero()[0].tolist()
    inside, done = threading.Event(), threading.Event()

    def read() -> None:
        with table.readers.reading(here[0]):
            inside.set()
            assert done.wait(TIMEOUT_SECONDS)
            pages.append("read")

    def move(page_id: int) -> None:
        with table.readers.moving(page_id):
            pages.append(page_id)

    reader, mover = threading.Thread(target=read), threading.Thread(target=move, args=(here[0],))
    reader.start()
    assert inside.wait(TIMEOUT_SECONDS)
    mover.start()
    move(here[1])
    done.set()
    for thread in (reader, mover):
        thread.join(TIMEOUT_SECONDS)
    assert pages == [here[1], "read", here[0]]
    run.manager.close()


def test_a_writer_on_cores_that_the_process_has_not_is_refused(tmp_path):
    here = sorted(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match=rf"run on cores \[1023\], and this process may run on {re.escape(str(here))}"):
        Checkpointer(tmp_path, cpus=[1023])
    run = at_step(1)
    with writes_announced(Checkpointer(tmp_path, cpus=[here[-1], 1023]), run.state().experts) as checkpoints:
        assert checkpoints.save_beside(run.state(), SaveRequest(tag="t", step=1)) is None
        assert checkpoints.finish() is None
        checkpoints.close()
    assert_same(load(tmp_path), run)
