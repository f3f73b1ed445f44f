"""``megascale checkpoint convert``: between the project's format and others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.checkpoint.opening import Opened

PAGED, TORCH_DIST, HF = "paged", "torch_dist", "hf"
FORMATS = (PAGED, TORCH_DIST, HF)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("source", type=Path, help="a checkpoint, or a folder of them (then the newest whole one)")
    parser.add_argument(
        "target", type=Path, help="paged, torch_dist: the folder of checkpoints it is added to; hf: new"
    )
    parser.add_argument("--to", choices=FORMATS, required=True, help="format of the target")
    parser.add_argument("--tag", help="name of a paged target (default: as Megatron's, or `hf`)")
    parser.add_argument("--like", type=Path, metavar="FOLDER", help="to hf: whose configuration and tokenizer to copy")
    parser.add_argument("--style", help="from hf: how experts' tensors lie, where their shapes do not tell")
    parser.add_argument("--page-size", default="16MiB", help="from hf and torch_dist: largest page (default 16MiB)")


def format_of(folder: Path) -> str:
    """The format of what is in a folder.

    Raises:
        ValueError: none that is known.
    """
    from megascale_omni.checkpoint.manifest import MANIFEST
    from megascale_omni.checkpoint.store import is_store

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if (folder / MANIFEST).is_file() or is_store(folder):
        return PAGED
    _refuse_by_name(folder)
    if (folder / "latest_checkpointed_iteration.txt").is_file() or (folder / "common.pt").is_file():
        return TORCH_DIST
    if any(folder.glob("*.safetensors")):
        return HF
    raise ValueError(f"{folder} holds no checkpoint of a known format: {', '.join(FORMATS)}")


def _refuse_by_name(folder: Path) -> None:
    """Says what is known about formats that are not read."""
    inside = ("*", "*/*")
    if any(any(folder.glob(f"{at}model_states.pt")) for at in inside):
        raise ValueError(
            f"{folder} is DeepSpeed's own checkpoint, whose files belong to a ZeRO stage and a number of ranks: load "
            "it in a run like the one that saved it, and save there with deepspeed_ext.elastic.save_elastic; or take "
            "its weights with DeepSpeed's zero_to_fp32"
        )
    old = any(any(folder.glob(f"{at}/model_optim_rng.pt")) for at in inside)
    if old and not any(folder.glob("*/common.pt")):
        raise ValueError(
            f"{folder} is in Megatron's old format torch: load it with Megatron-LM, and save with "
            "--ckpt-format torch_dist"
        )


def run(args: argparse.Namespace) -> int:
    """Convert; prints where the result is."""
    from megascale_omni.config import parse_bytes

    found = format_of(args.source)
    if PAGED not in (found, args.to) or found == args.to:
        raise ValueError(f"{args.source} is {found}; convert goes from {PAGED} to another format, or back")
    page_bytes = parse_bytes(args.page_size, key="--page-size")
    if args.to == PAGED:
        print(_to_paged(args, found, page_bytes))
        return 0
    opened = _opened(args.source)
    if args.to == HF:
        from megascale_omni.checkpoint.convert_hf import to_hf

        print(to_hf(opened, args.target, like=args.like))
    else:
        from megascale_omni.checkpoint.megatron_write import to_torch_dist

        print(to_torch_dist(opened, args.target))
    return 0


def _to_paged(args: argparse.Namespace, found: str, page_bytes: int) -> Path:
    if found == HF:
        from megascale_omni.checkpoint.convert_hf import from_hf

        return from_hf(args.source, args.target, args.tag or "hf", style=args.style, page_bytes=page_bytes)
    from megascale_omni.checkpoint.megatron_read import from_torch_dist

    return from_torch_dist(args.source, args.target, tag=args.tag, page_bytes=page_bytes)


def _opened(source: Path) -> Opened:
    from megascale_omni.checkpoint.checkpointer import Checkpointer
    from megascale_omni.checkpoint.manifest import MANIFEST

    one = (source / MANIFEST).is_file()
    opened = Checkpointer(source.parent if one else source).open(source.name if one else None)
    if opened is None:
        raise ValueError(f"{source} holds no checkpoint")
    return opened
