"""Experts modules of every layout of the interface, and every form in which a model is saved."""

import itertools
from pathlib import Path

import pytest

from scripts.deepspeed_runs.models import Size
from scripts.deepspeed_runs.proof import Case
from tests.distributed.pool import Pools
from tests.integration.deepspeed_ext import layouts

FORMS = ("state_dict", "save_pretrained", "save_16bit_model")


def test_every_layout_is_stocks(pools: Pools) -> None:
    names = ("transposed", "concatenated", "bias")
    wanted = [dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=3)]
    (found,) = pools[1].run(layouts.losses, layouts=wanted)
    for layout, (stock, paged) in zip(wanted, found, strict=True):
        assert paged == pytest.approx(stock, rel=1e-5), layout
        assert len(set(stock)) == len(stock)


@pytest.mark.parametrize(
    ("stage", "divided", "refused"),
    [(1, False, ()), (2, True, FORMS), (3, True, FORMS[:2])],
)
def test_a_saved_model_has_the_experts_or_it_is_refused_by_name(
    pools: Pools, tmp_path: Path, stage: int, divided: bool, refused: tuple[str, ...]
) -> None:
    section: dict[str, object] = {"expert_parallel_size": 2} if divided else {}
    case = Case(stage=stage, size=Size(experts=4, layers=1), section=section)
    for said in pools[2].run(layouts.saved_forms, case=case, folder=str(tmp_path)):
        for form in FORMS:
            if form in refused:
                assert "model.layers.0.mlp.experts: this rank holds experts" in said[form]
                assert "use deepspeed_ext.export_hf" in said[form]
            else:
                assert said[form] == "experts", form
