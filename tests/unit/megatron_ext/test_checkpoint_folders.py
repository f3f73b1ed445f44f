"""A folder that nothing would be loaded from, although there are checkpoints, is refused with what to give instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.checkpoint_folders import TRACKER, check_formats, check_load


def stock(path: Path, *files: str) -> Path:
    """A folder with files of stock's format."""
    path.mkdir(parents=True)
    for name in files or ("common.pt", "__0_0.distcp", ".metadata", "metadata.json"):
        (path / name).touch()
    return path


def paged(path: Path) -> Path:
    """A folder as a checkpoint of MegaScale's own format."""
    (path / "mpu_001_experts_state").mkdir(parents=True)
    (path / "manifest.json").touch()
    return path


@pytest.mark.parametrize(
    "make",
    [
        stock,
        paged,
        lambda path: stock(path, "__0_0.distcp"),
        lambda path: stock(path / "mp_rank_00").parent,
    ],
    ids=["stock", "paged", "interrupted", "older"],
)
def test_a_checkpoint_itself(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    make(tmp_path / "iter_0000040")
    said = (
        f"is a checkpoint itself, and wanted is the folder that checkpoints lie in: give --load {tmp_path} --ckpt-ste"
    )
    for step in (None, 40):
        with pytest.raises(ValueError, match=re.escape(f"{said}p 40")):
            check_load(tmp_path / "iter_0000040", step=step)


def test_a_checkpoint_of_another_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"give --load {re.escape(str(tmp_path))}$"):
        check_load(stock(tmp_path / "release"))


def test_checkpoints_that_no_tracker_names(tmp_path: Path) -> None:
    for step in (5, 40):
        stock(tmp_path / f"iter_{step:07d}")
    with pytest.raises(ValueError, match=rf"iterations 5, 40\), but no {TRACKER}.*add --ckpt-step 40"):
        check_load(tmp_path)
    check_load(tmp_path, step=5)
    (tmp_path / TRACKER).write_text("40")
    check_load(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path / "absent",
        lambda path: path,
        lambda path: stock(path / "iter_0000040", "common.pt", "__0_0.distcp").parent,
        lambda path: paged(path / "iter_0000040").parent,
    ],
    ids=["absent", "empty", "interrupted first save", "paged"],
)
def test_folders_to_begin_or_go_on_with(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    check_load(make(tmp_path))


@pytest.mark.parametrize(
    ("loads", "saves", "is_paged", "said"),
    [
        ("paged", None, True, "--skip-train is not supported with a checkpoint of the paged format .*; convert it"),
        ("stock", "paged", False, "holds checkpoints of the paged format, which would be loaded again"),
        ("stock", "file", False, "file is no folder"),
        ("stock", "paged", True, None),
        ("stock", "stock", False, None),
        ("nothing", "nothing", True, None),
        (None, None, False, None),
    ],
)
def test_formats_that_do_not_go_together(
    tmp_path: Path, loads: str | None, saves: str | None, is_paged: bool, said: str | None
) -> None:
    stock(tmp_path / "stock" / "iter_0000040")
    paged(tmp_path / "paged" / "iter_0000040")
    (tmp_path / "file").touch()
    load, save = (None if name is None else str(tmp_path / name) for name in (loads, saves))
    if said is None:
        check_formats(load=load, save=save, paged=is_paged, asked={"--skip-train": "convert it"})
        return
    with pytest.raises(ValueError, match=said):
        check_formats(load=load, save=save, paged=is_paged, asked={"--skip-train": "convert it"})
