"""The pool of ranks itself: every way a rank can fail ends in an error that names it and in a pool that works again."""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.distributed.pool import Pool, Pools, RanksDied, RanksRaised, RanksSilent

ROOT = Path(__file__).parents[2]

# A test session whose ranks hang; before, it prints their folder and process ids.
STUCK_SESSION = """
import sys
from tests.distributed.pool import Pool
from tests.distributed.test_pool import describe, never_return_on
pool = Pool(2)
pool.run(describe)
print(pool.folder, *pool.process_ids, flush=True)
pool.run(never_return_on, stuck=1)
"""


def gather_ranks(rank: int, world: int, offset: int) -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    distributed.all_gather(parts, torch.tensor([offset + rank]))
    return [int(part) for part in parts]


def describe(rank: int, world: int) -> tuple[int, int, int, int, str]:
    return rank, distributed.get_rank(), distributed.get_world_size(), torch.get_num_threads(), os.environ["RANK"]


def scale(rank: int, world: int, x: torch.Tensor) -> torch.Tensor:
    return x * (rank + 1)


def draw(rank: int, world: int) -> float:
    return float(torch.rand(()))


def raise_on(rank: int, world: int, ranks: list[int], then_wait: bool) -> str:
    if rank in ranks:
        raise ValueError(f"rank {rank} does not like this")
    if then_wait:
        distributed.barrier()
    return "fine"


def exit_on(rank: int, world: int, dying: int, code: int) -> None:
    if rank == dying:
        os._exit(code)
    distributed.barrier()


def kill_on(rank: int, world: int, dying: int) -> None:
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)


def never_return_on(rank: int, world: int, stuck: int) -> int:
    if rank == stuck:
        threading.Event().wait()
    return rank


def keep_a_loss(rank: int, world: int, layers: int) -> int:
    """Sums of losses, a layer each, as Megatron keeps them: as long as the first model was deep."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.save_to_aux_losses_tracker("loss", torch.ones(()), layer_number=layers, num_layers=layers)
    return len(moe_utils.get_moe_layer_wise_logging_tracker()["loss"]["values"])


def return_a_lock(rank: int, world: int) -> object:
    return threading.Lock()


@pytest.fixture(scope="module")
def pool():
    with Pools() as pools:  # of its own: these tests kill ranks
        yield pools[3]


def test_every_rank_runs_the_function_and_answers_in_order(pool):
    assert pool.run(gather_ranks, offset=10) == [[10, 11, 12]] * 3
    assert pool.run(describe) == [(rank, rank, 3, 1, str(rank)) for rank in range(3)]


def test_a_function_may_be_named_by_its_path(pool):
    assert pool.run("tests.distributed.test_pool:gather_ranks", offset=0) == [[0, 1, 2]] * 3


def test_tensors_travel_both_ways(pool):
    x = torch.arange(4.0)
    for rank, y in enumerate(pool.run(scale, x=x)):
        assert torch.equal(y, x * (rank + 1))


def test_ranks_live_on_and_every_run_starts_from_the_same_seed(pool):
    first, ids = pool.run(draw), pool.process_ids
    assert pool.run(draw) == first == [first[0]] * 3
    assert pool.process_ids == ids
    assert len(set(ids)) == 3


def test_a_run_finds_nothing_of_the_model_before_it(pool):
    assert pool.run(keep_a_loss, layers=1) == [1] * 3
    assert pool.run(keep_a_loss, layers=2) == [2] * 3


def test_pools_of_one_size_are_one_and_start_when_used():
    with Pools() as pools:
        assert pools[1] is pools[1]
        assert pools[1] is not pools[2]
        assert pools[1].run(describe) == [(0, 0, 1, 1, "0")]
        (used,) = pools[1].process_ids
        assert pools[2].process_ids == []
    with pytest.raises(ProcessLookupError):
        os.kill(used, 0)


def test_an_exception_is_raised_with_its_rank_and_traceback(pool):
    with pytest.raises(RanksRaised, match=r"rank 1: ValueError: rank 1 does not like this") as caught:
        pool.run(raise_on, ranks=[1], then_wait=False)
    assert caught.value.ranks == [1]
    assert caught.value.failures[1].type_name == "ValueError"
    assert "in raise_on" in str(caught.value)
    assert pool.process_ids == [], "nobody knows in what state the ranks are"
    assert pool.run(gather_ranks, offset=1) == [[1, 2, 3]] * 3


def test_an_exception_on_every_rank_is_raised_with_all_of_them(pool):
    with pytest.raises(RanksRaised) as caught:
        pool.run(raise_on, ranks=[0, 1, 2], then_wait=False)
    assert caught.value.ranks == [0, 1, 2]


def test_an_exception_is_raised_though_the_others_wait_for_that_rank(pool):
    with pytest.raises(RanksRaised, match="rank 2 does not like this") as caught:
        pool.run(raise_on, ranks=[2], then_wait=True)
    assert 2 in caught.value.ranks
    assert pool.run(gather_ranks, offset=2) == [[2, 3, 4]] * 3


def test_a_result_that_cannot_travel_is_an_exception(pool):
    with pytest.raises(RanksRaised, match="cannot pickle"):
        pool.run(return_a_lock)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_dead_rank_is_named_and_the_next_run_has_new_ranks(pool, dying):
    with pytest.raises(RanksDied, match=f"rank {dying} with exit code 7 died") as caught:
        pool.run(exit_on, dying=dying, code=7)
    assert caught.value.ranks == [dying]
    assert pool.process_ids == []
    assert pool.run(gather_ranks, offset=3) == [[3, 4, 5]] * 3


def test_a_killed_rank_is_named_with_its_signal(pool):
    with pytest.raises(RanksDied, match=f"rank 1 with exit code -{signal.SIGKILL.value} died"):
        pool.run(kill_on, dying=1)


def test_a_rank_killed_between_runs_is_named(pool):
    pool.run(draw)
    os.kill(pool.process_ids[1], signal.SIGKILL)
    with pytest.raises(RanksDied, match="rank 1 with exit code"):
        pool.run(gather_ranks, offset=0)


def test_silent_ranks_are_named_with_where_they_stand_and_ended(pool):
    pool.run(draw)
    ids = pool.process_ids
    with pytest.raises(RanksSilent, match=r"no answer from ranks \[1\] in 2 s") as caught:
        pool.run(never_return_on, stuck=1, timeout_seconds=2)
    assert caught.value.ranks == [1]
    assert "never_return_on" in str(caught.value).split("stood at")[1]
    for process_id in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    assert pool.run(gather_ranks, offset=4) == [[4, 5, 6]] * 3


def test_ranks_end_with_a_session_that_is_killed_and_leave_nothing():
    session = subprocess.Popen([sys.executable, "-c", STUCK_SESSION], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert session.stdout is not None
    folder, *numbers = session.stdout.readline().split()
    watched = [os.pidfd_open(int(number)) for number in numbers]
    assert len(watched) == 2
    assert Path(folder).is_dir()
    session.kill()
    session.wait(timeout=30)
    for rank in watched:
        ended, _, _ = select.select([rank], [], [], 30)
        assert ended, "a rank outlived the session"
        os.close(rank)
    assert not Path(folder).exists()


def test_functions_that_ranks_cannot_import_are_refused():
    with pytest.raises(ValueError, match="cannot import"):
        Pool(2).run(lambda rank, world: None)
    with pytest.raises(ValueError, match="at least 1"):
        Pool(0)
