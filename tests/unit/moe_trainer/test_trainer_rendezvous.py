"""Ranks of one start take one name over a store in which earlier starts left their keys."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from scripts.moe_trainer.rendezvous import agreed_start

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def port():
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def client(port: int) -> torch.distributed.Store:
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def start(port: int, world_size: int) -> list[str]:
    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(agreed_start, client(port), rank, world_size, TIMEOUT) for rank in range(world_size)]
        return [rank.result(60) for rank in ranks]


def test_every_start_has_one_name_of_its_own(port):
    names = [start(port, world_size) for world_size in (3, 3, 2, 4)]
    assert all(len(set(of_one_start)) == 1 for of_one_start in names)
    assert len({of_one_start[0] for of_one_start in names}) == 4


def test_a_rank_that_greeted_and_died_is_replaced(port):
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(agreed_start, client(port), 0, 2, TIMEOUT)
        store = client(port)
        store.set("start/greeting/1", "of a rank that died")
        store.wait(["start/answer/of a rank that died"], TIMEOUT)
        assert not host.done(), "an answer alone says nothing of the rank's life"
        assert agreed_start(store, 1, 2, TIMEOUT) == host.result(60)


def test_the_answer_of_an_earlier_host_is_not_taken(port):
    store = client(port)
    store.set("start/greeting/1", "left behind")
    with pytest.raises(torch.distributed.DistStoreError):
        agreed_start(store, 0, 2, timedelta(seconds=0.2))
    assert len(set(start(port, 2))) == 1


def test_missing_ranks_are_named(port):
    with ThreadPoolExecutor(1) as pool:
        present = pool.submit(agreed_start, client(port), 2, 4, TIMEOUT)
        with pytest.raises(torch.distributed.DistStoreError, match=r"has not heard from ranks \[1, 3\]"):
            agreed_start(client(port), 0, 4, timedelta(seconds=2))
        present.result(60)


def test_a_rank_without_a_host_gives_up(port):
    with pytest.raises(torch.distributed.DistStoreError):
        agreed_start(client(port), 1, 2, timedelta(seconds=0.2))
