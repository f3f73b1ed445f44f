"""Folders that are no checkpoint of this engine are refused before anything is loaded; an error of any kind is told."""

import re
from pathlib import Path

import pytest

from deepspeed_ext.checkpoint import check

FILES = {
    0: ["mp_rank_00_model_states.pt"],
    1: ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    2: ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    3: ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
}


def saved(folder: Path, stage: int) -> Path:
    tag = folder / f"step{stage}"
    (tag / "megascale").mkdir(parents=True)
    (tag / "megascale" / "manifest.json").write_text("{}")
    for name in FILES[stage]:
        (tag / name).touch()
    return tag


@pytest.mark.parametrize("module_only", [False, True])
@pytest.mark.parametrize("stage", FILES)
@pytest.mark.parametrize("of", FILES)
def test_zero_stages(tmp_path: Path, stage: int, of: int, module_only: bool) -> None:
    tag = saved(tmp_path, of)
    if stage == of or {stage, of} == {1, 2} or (module_only and 3 not in (stage, of)):
        check(tag, paged=True, stage=stage, module_only=module_only)
        return
    with pytest.raises(ValueError, match=r"was saved under .* and this engine has .*elastic"):
        check(tag, paged=True, stage=stage, module_only=module_only)


def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=re.escape(f"none does not exist; {tmp_path} has step1") + "$"):
        check(tmp_path / "none", paged=True, stage=1, module_only=False)


def test_pages_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    tag = saved(tmp_path, 0)
    (tag / "megascale" / "manifest.json").unlink()
    check(tag, paged=False, stage=0, module_only=False)
    with pytest.raises(ValueError, match=r"has no manifest\.json: the checkpoint is not whole"):
        check(tag, paged=True, stage=0, module_only=False)
    (tag / "megascale").rmdir()
    with pytest.raises(ValueError, match="was saved without megascale"):
        check(tag, paged=True, stage=0, module_only=False)
