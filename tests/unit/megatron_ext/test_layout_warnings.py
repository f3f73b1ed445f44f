"""What an option cannot do on the ranks there are is said once, not refused: a configuration serves several layouts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.distributed.megatron_state import fresh_parallel_state
from tests.distributed.pool import Pools
from tests.unit.megatron_ext.layers import build


def said(rank: int, world: int, *, options: dict[str, Any]) -> list[str]:
    """What building a layer says of options in vain."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_ext")
    logger.addHandler(handler)
    try:
        fresh_parallel_state()
        build(megascale=True, **options)
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if "has no effect" in message]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": {}}, "distributed.dispatcher=groups has no effect with --expert-model-parallel-size 1"),
        ({"grad_wire": "bf16"}, "distributed.grad_wire=bf16 has no effect where no expert has a second copy"),
    ],
)
def test_one_rank_makes_an_option_idle(pools: Pools, options: dict[str, Any], message: str) -> None:
    (messages,) = pools[1].run(said, options=options)
    assert [one.startswith(message) for one in messages] == [True]
    assert pools[1].run(said, options={}) == [[]]
