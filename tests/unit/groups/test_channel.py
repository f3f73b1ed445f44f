"""Whom a rank names when an exchange fails: what the store in which ranks meet says, or that it is gone, too."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from megascale_omni.groups.channel import Channel


class Store:
    """Of ranks 1 to 3, whose answers are given."""

    def __init__(self, answers: dict[int, Exception | None], on_set: Exception | None = None) -> None:
        self._answers, self._on_set = answers, on_set

    def set(self, key: str, value: str) -> None:
        if self._on_set is not None:
            raise self._on_set

    def wait(self, keys: list[str], timeout: object) -> None:
        answer = self._answers[int(keys[0].rpartition("/")[2])]
        if answer is not None:
            raise answer


LATE, BROKEN = dist.DistStoreError("wait timeout"), dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(
    ("store", "launcher", "named"),
    [
        (Store({0: None, 2: LATE, 3: None}), False, [2]),
        (Store({0: LATE, 2: None, 3: LATE}), False, [0, 3]),
        (Store({0: BROKEN, 2: BROKEN, 3: BROKEN}), False, [0]),
        (Store({0: None, 2: LATE, 3: BROKEN}), False, [0]),
        (Store({}, on_set=BROKEN), False, [0]),
        (Store({}, on_set=BROKEN), True, []),
    ],
    ids=["one is late", "two are late", "store broken", "breaks meanwhile", "broken at once", "kept by the launcher"],
)
def test_a_rank_that_lives_is_not_named_because_the_store_is_gone(monkeypatch, store, launcher, named):
    channel = Channel(None)
    channel.global_ranks = (0, 1, 2, 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(launcher))
    gone: Callable[[], list[int]] = channel._gone
    assert gone() == named
