"""Hugging Face's Trainer with a section in its DeepSpeed configuration: train, evaluate, save, resume."""

from pathlib import Path

import pytest

from tests.distributed.pool import Pools
from tests.integration.deepspeed_ext import trainer

pytest.importorskip("accelerate", reason="needs the extra `hf`")


@pytest.mark.parametrize(("stage", "client"), [(3, False), (1, True)])
def test_a_run_is_stocks_and_goes_on_where_it_was(pools: Pools, tmp_path: Path, stage: int, client: bool) -> None:
    """With DeepSpeed's optimizer and schedule, and with the Trainer's own, which sorts parameters by their names."""
    stock, paged = (
        pools[2].run(trainer.train, stage=stage, client=client, megascale=side, folder=str(tmp_path / str(side)))[0]
        for side in (False, True)
    )
    assert paged.engine == "MegaScaleEngine"
    assert len(stock.losses) == 4
    assert paged.losses == pytest.approx(stock.losses, rel=1e-6)
    assert paged.evaluated == pytest.approx(stock.evaluated, rel=1e-6)
    assert paged.resumed == paged.losses[2:]
    assert paged.published.keys() == stock.published.keys()
    for name, tensor in stock.published.items():
        difference = float((paged.published[name] - tensor).norm() / tensor.norm())
        assert difference <= 1e-5, name
