"""``megascale checkpoint convert``: between the project's format and others, and increments into whole checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megascale_omni.checkpoint.opening import Opened

PAGED, TORCH_DIST, HF, DEEPSPEED = "paged", "torch_dist", "hf", "deepspeed"
FORMATS = (PAGED, TORCH_DIST, HF, DEEPSPEED)
MEGATRON = "megatron"
NAMES = (HF, MEGATRON)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("source", type=Path, help="a checkpoint, or a folder of them (then the newest whole one)")
    parser.add_argument("target", type=Path, help="the folder of checkpoints it is added to; hf: a new folder")
    parser.add_argument("--to", choices=FORMATS, required=True, help="format of the target")
    parser.add_argument(
        "--names",
        choices=NAMES,
        help="from paged to paged: whose names tensors get (hf: a Megatron run's checkpoint for DeepSpeed)",
    )
    parser.add_argument(
        "--tag", help="name of a paged or deepspeed target (default: the source's, as its framework's, or `hf`)"
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="FOLDER",
        help="to hf: whose configuration and tokenizer to copy; --names megatron: a checkpoint of the run that goes on",
    )
    parser.add_argument("--style", help="from hf, deepspeed: how experts' tensors lie, where shapes do not tell")
    parser.add_argument("--page-size", help="from other formats to paged: largest page (default 16MiB)")


def format_of(folder: Path) -> str:
    """The format of what is in a folder.

    Raises:
        ValueError: none that is known.
    """
    from megascale_omni.checkpoint.manifest import MANIFEST
    from megascale_omni.checkpoint.store import is_store

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if any(folder.glob("*model_states.pt")):  # pages may lie in a folder beside them
        return DEEPSPEED
    if (folder / MANIFEST).is_file() or is_store(folder):
        return PAGED
    if any(folder.glob("*/*model_states.pt")):
        return DEEPSPEED
    old = any(any(folder.glob(f"{at}/model_optim_rng.pt")) for at in ("*", "*/*"))
    if old and not any(folder.glob("*/common.pt")):
        raise ValueError(
            f"{folder} is in Megatron's old format torch: load it with Megatron-LM, and save with "
            "--ckpt-format torch_dist"
        )
    if (folder / "latest_checkpointed_iteration.txt").is_file() or (folder / "common.pt").is_file():
        return TORCH_DIST
    if any(folder.glob("*.safetensors")):
        return HF
    raise ValueError(f"{folder} holds no checkpoint of a known format: {', '.join(FORMATS)}")


def run(args: argparse.Namespace) -> int:
    """Convert; prints where the result is."""
    from megascale_omni.config import parse_bytes

    found = format_of(args.source)
    page_bytes = parse_bytes(args.page_size or "16MiB", key="--page-size")
    if args.names is not None and (found, args.to) != (PAGED, PAGED):
        raise ValueError(f"--names is for a checkpoint that is {PAGED} before and after; {args.source} is {found}")
    for flag in ("page_size", "style") if found == args.to == PAGED else ():
        if getattr(args, flag) is not None:
            raise ValueError(
                f"--{flag.replace('_', '-')} has no effect from {PAGED} to {PAGED}: pages stay as they are, and are "
                "cut anew when a run loads them; leave it out"
            )
    if found == args.to != PAGED:
        raise ValueError(f"{args.source} is {found} already")
    if PAGED not in (found, args.to):
        raise ValueError(f"{args.source} is {found}; convert goes from {PAGED} to another format, or back")
    print(_from_paged(args) if found == PAGED else _to_paged(args, found, page_bytes))
    return 0


def _from_paged(args: argparse.Namespace) -> Path:
    opened = _opened(args.source)
    if args.to == HF:
        from megascale_omni.checkpoint.convert_hf import to_hf

        return to_hf(opened, args.target, like=args.like)
    if args.to == DEEPSPEED:
        from megascale_omni.checkpoint.deepspeed_write import to_deepspeed

        return to_deepspeed(opened, args.target, tag=args.tag)
    if args.to == TORCH_DIST:
        from megascale_omni.checkpoint.megatron_write import to_torch_dist

        return to_torch_dist(opened, args.target)
    if args.names is None:
        from megascale_omni.checkpoint.compact import make_whole

        return make_whole(opened, args.target, args.tag)
    from megascale_omni.checkpoint.rename import to_hf_names, to_megatron_names

    if args.names == HF:
        return to_hf_names(opened, args.target, args.tag)
    if args.like is None:
        raise ValueError("--names megatron needs --like: a checkpoint of the Megatron run that is to go on")
    return to_megatron_names(opened, args.target, args.tag, like=_opened(args.like))


def _to_paged(args: argparse.Namespace, found: str, page_bytes: int) -> Path:
    if found == HF:
        from megascale_omni.checkpoint.convert_hf import from_hf

        return from_hf(args.source, args.target, args.tag or "hf", style=args.style, page_bytes=page_bytes)
    if found == DEEPSPEED:
        from megascale_omni.checkpoint.deepspeed_read import from_deepspeed

        return from_deepspeed(args.source, args.target, tag=args.tag, style=args.style, page_bytes=page_bytes)
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
