"""What every test gets: a printed seed, reproducible property tests, the shared pools of ranks."""

import os
import random
import zlib
from collections.abc import Iterator

import hypothesis
import numpy
import pytest
import torch

from tests.distributed.pool import Pools

# No deadline: no test here asserts a timing. Derandomised: a failure seen once is seen again.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds torch, numpy and random, and prints the seed (shown where a test fails).

    It is made of the test's name, so that it neither depends on the order of tests nor changes from run to run;
    MEGASCALE_TEST_SEED=N sets another.
    """
    value = int(os.environ.get("MEGASCALE_TEST_SEED") or zlib.crc32(request.node.nodeid.encode()))
    print(f"seed: MEGASCALE_TEST_SEED={value}")
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)
    return value


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Ranks for distributed tests: ``pools[2].run(function, **arguments)``, see tests/distributed/pool.py."""
    with Pools() as opened:
        yield opened
