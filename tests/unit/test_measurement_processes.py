"""Ranks in processes of their own, their memory, and the bytes they send."""

import os
import subprocess
import sys

import pytest

from scripts.measuring import processes
from scripts.measuring.memory import MemorySampler, peak_resident_bytes, resident_bytes
from scripts.measuring.processes import Workers, WorkersFailed

MIB = 2**20


def ranks(count=2, **arguments):
    return Workers(
        "tests.unit.measurement_ranks:Ranks",
        ranks=count,
        threads=1,
        name="sample",
        arguments={"base": 10, **arguments},
        group_timeout_seconds=60,
    )


@pytest.fixture(scope="module")
def two_ranks():
    with ranks() as workers:
        yield workers


@pytest.fixture
def short_grace(monkeypatch):
    """Ranks that wait for a failed one get less time: here they never answer."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.2)


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_rank_answers_from_inside_one_group(two_ranks):
    assert two_ranks.call("total", timeout_seconds=60, extra=1) == [23, 23]
    assert two_ranks.call("total", timeout_seconds=60, extra=2) == [25, 25]


def test_each_rank_is_a_process_with_its_own_threads(two_ranks):
    found = two_ranks.call("surroundings", timeout_seconds=60)
    assert [rank["rank"] for rank in found] == ["0", "1"]
    assert [rank["threads"] for rank in found] == [1, 1]
    assert [rank["omp"] for rank in found] == ["1", "1"]
    assert tuple(rank["pid"] for rank in found) == two_ranks.process_ids
    assert os.getpid() not in two_ranks.process_ids


def test_bytes_that_leave_a_rank_are_counted_by_the_kind_of_collective(two_ranks):
    first, second = two_ranks.call("sent_bytes", timeout_seconds=60)
    same_on_both = {
        "all_reduce": 48,  # 2 x 48 x 1/2
        "all_gather": 48,
        "all_gather_into_tensor": 48,
        "reduce_scatter_tensor": 24,
        "all_to_all_single": 24,
        "batched exchange": 48,
        "barrier": 0,
    }
    assert {name: first[name] for name in same_on_both} == same_on_both
    assert {name: second[name] for name in same_on_both} == same_on_both
    assert (first["uneven all_to_all_single"], second["uneven all_to_all_single"]) == (12, 20)
    assert (first["broadcast from 0"], second["broadcast from 0"]) == (48, 0)
    assert (first["broadcast from 1"], second["broadcast from 1"]) == (0, 48)
    assert (first["reduce to 1"], second["reduce to 1"]) == (48, 0)
    assert (first["send to 1"], second["send to 1"]) == (48, 0)


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_raises_ends_all_of_them_and_is_named():
    workers = ranks()
    workers.wait_until_ready()
    process_ids = workers.process_ids
    with pytest.raises(WorkersFailed, match=r"rank 1: RuntimeError: rank 1 cannot go on") as caught:
        workers.call("fail_on", timeout_seconds=60, rank=1)
    assert caught.value.user_error is None
    assert not any(map(is_running, process_ids))


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_dies_is_named_with_what_it_said_last():
    workers = ranks()
    with pytest.raises(WorkersFailed, match=r"rank 0: died with exit code 7\n    the last words of a rank"):
        workers.call("die_on", timeout_seconds=60, rank=0)


def test_a_rank_that_does_not_answer_is_given_up():
    workers = ranks(1)
    workers.wait_until_ready()
    (process,) = workers.process_ids
    with pytest.raises(WorkersFailed, match="rank 0: no answer"):
        workers.call("be_silent", timeout_seconds=0.05)
    assert not is_running(process)


def test_a_mistake_of_the_user_is_passed_on_as_such():
    with pytest.raises(WorkersFailed) as caught:
        ranks(1, base=-3).wait_until_ready()
    assert caught.value.user_error == "base -3 must not be negative"


@pytest.fixture
def child():
    """A process that allocates and frees what it is told on standard input, and answers when it has."""
    program = (
        "import sys\n"
        "held = b''\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    held = b''\n"
        "    held = b'x' * (int(line) << 20)\n"
        "    print('done', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait(timeout=10)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def hold(child, mebibytes):
    child.stdin.write(f"{mebibytes}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"


def test_memory_of_a_process_follows_what_it_allocates(child):
    before = resident_bytes(child.pid)
    hold(child, 96)
    assert 94 * MIB <= resident_bytes(child.pid) - before <= 104 * MIB
    hold(child, 0)
    assert resident_bytes(child.pid) - before <= 8 * MIB
    assert 94 * MIB <= peak_resident_bytes(child.pid) - before <= 104 * MIB


def test_a_sampler_sees_the_sum_of_its_processes_while_it_runs(child):
    own = resident_bytes(child.pid)
    sampler = MemorySampler([child.pid, child.pid], interval_seconds=0.01)
    hold(child, 64)
    with sampler:
        pass
    hold(child, 0)
    sampler.resume()
    sampler.pause()
    assert 2 * (own + 62 * MIB) <= sampler.largest_bytes <= 2 * (own + 74 * MIB)
    assert sampler.samples[-1].resident_bytes <= 2 * (own + 8 * MIB)
    times = [sample.seconds for sample in sampler.samples]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_sampler_outlives_its_processes(child):
    sampler = MemorySampler([child.pid], interval_seconds=0.01)
    child.kill()
    child.wait(timeout=10)
    with sampler:
        pass
    assert sampler.samples == ()
    assert sampler.largest_bytes == 0


def test_a_sampler_is_not_started_twice():
    with MemorySampler([os.getpid()]) as sampler, pytest.raises(RuntimeError, match="running already"):
        sampler.resume()


def test_memory_of_a_process_that_is_gone_is_an_error():
    with pytest.raises((OSError, RuntimeError)):
        resident_bytes(2**22 + 1)
