"""``megascale checkpoint``: what checkpoints there are, whether they are whole, what is in them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megascale_omni.cli import checkpoint_convert

if TYPE_CHECKING:
    from megascale_omni.checkpoint.store import Found

NAME = "checkpoint"
HELP = "list, verify, show, convert and remove checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="what", required=True)
    listing = commands.add_parser("ls", help="the checkpoints of a folder, newest first")
    verify = commands.add_parser("verify", help="check every byte of one checkpoint, or of all in a folder")
    show = commands.add_parser("show", help="what a checkpoint holds")
    collect = commands.add_parser("gc", help="remove all but the newest checkpoints and what they need")
    for command, more in (
        (listing, ""),
        (verify, ", or FOLDER/TAG for one of them"),
        (show, ", or FOLDER/TAG"),
        (collect, ""),
    ):
        command.add_argument("folder", type=Path, metavar="FOLDER", help=f"of checkpoints, as given to --save{more}")
    checkpoint_convert.add_arguments(
        commands.add_parser("convert", help="to Megatron's, DeepSpeed's or Hugging Face's format, or back")
    )
    show.add_argument("--json", action="store_true", help="everything, as JSON")
    collect.add_argument("--keep", type=int, default=2, help="how many of the newest stay (default and least 2)")
    collect.add_argument("--dry-run", action="store_true", help="name them, remove nothing")


def run(args: argparse.Namespace) -> int:
    """Run a sub-command; 1 where something is damaged."""
    commands = {"ls": _ls, "verify": _verify, "show": _show, "gc": _gc, "convert": checkpoint_convert.run}
    return commands[args.what](args)


def _list(folder: Path) -> list[Found]:
    from megascale_omni.checkpoint.store import list_checkpoints

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    found, broken = list_checkpoints(folder)
    for error in broken:
        print(f"broken: {error}")
    if not found and not broken:
        raise ValueError(f"{folder} holds no checkpoints of format paged (stock's are not listed)")
    return found


def _size(found: Found) -> str:
    return f"{sum(record.size for record in found.manifest.files) / 2**20:,.1f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ls(args: argparse.Namespace) -> int:
    for found in _list(args.folder):
        manifest = found.manifest
        needs = f"  needs {', '.join(manifest.needs)}" if manifest.needs else ""
        ranks = _count(manifest.layout.get("world_size", 1), "rank")
        print(f"{found.folder.name}  step {manifest.step}  {manifest.kind}  {_size(found)}  {ranks}{needs}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megascale_omni.checkpoint.manifest import MANIFEST, CheckpointError, verify
    from megascale_omni.checkpoint.store import list_checkpoints

    if not args.folder.is_dir():
        raise ValueError(f"{args.folder} is not a folder")
    folders = [args.folder]
    problems: list[str] = []
    if not (args.folder / MANIFEST).exists() and not any(args.folder.glob("mpu_*_state")):
        found, broken = list_checkpoints(args.folder)
        if not found and not broken:
            raise ValueError(f"{args.folder} holds no checkpoints of format paged (stock's are not listed)")
        folders = [f.folder for f in found]
        problems = [str(error) for error in broken]
    for folder in folders:
        try:
            wrong = verify(folder)
        except CheckpointError as error:
            wrong = error.problems
        print(f"{folder}: {'damaged' if wrong else 'whole'}")
        problems += [f"{folder}: {line}" for line in wrong]
    for line in problems:
        print(f"  {line}")
    return 1 if problems else 0


def _show(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from megascale_omni.checkpoint.checkpointer import Opened
    from megascale_omni.checkpoint.manifest import read_manifest
    from megascale_omni.checkpoint.store import is_checkpoint

    folder = args.folder
    if folder.is_dir() and not is_checkpoint(folder):  # a folder of them: the newest one
        folder = next(found.folder for found in _list(folder))
    manifest, checksum = read_manifest(folder)
    if args.json:
        print(json.dumps({"checksum": checksum, **asdict(manifest)}, indent=1))
        return 0
    opened = Opened.read(folder)
    print(f"{manifest.tag}: step {manifest.step}, {manifest.kind}, manifest {checksum}")
    for name, values in (("layout", manifest.layout), ("versions", manifest.versions), ("needs", manifest.needs)):
        if values:
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in values.items()))
    if manifest.configuration:
        print(f"configuration: of {', '.join(manifest.configuration)} (--json has it)")
    for path, module in sorted(opened.pages.modules.items()):
        stored = [p for at, pages in opened.pages.pages.items() if at[0] == path for p in pages]
        shape = module.shape
        print(
            f"experts {path}: {module.num_experts} of hidden {shape.hidden}, {shape.ffn} neurons, in "
            f"{_count(len(stored), 'page')}, {_behind(opened.pages.num_steps, [page.last_step for page in stored])}"
        )
    for name, parts in sorted(opened.dense.tensors.items()):
        print(f"tensor {name}: {parts[0].place.dtype} {list(parts[0].global_shape)} in {_count(len(parts), 'part')}")
    for record in manifest.files:
        print(f"file {record.path}: {record.size} bytes, {record.checksum}")
    return 0


def _behind(num_steps: int | None, last_steps: list[int]) -> str:
    """How far a module's pages are behind the optimizer."""
    if num_steps is None:
        return "weights alone"
    behind = [num_steps - last for last in last_steps if last < num_steps]
    if not behind:
        return f"all of them at step {num_steps} of the optimizer"
    return f"{len(behind)} of them behind the optimizer's {num_steps} steps, by up to {max(behind)}"


def _gc(args: argparse.Namespace) -> int:
    from megascale_omni.checkpoint.store import LEAST_KEPT, Store, kept

    if args.keep < LEAST_KEPT:
        raise ValueError(f"--keep {args.keep} is too few: at least {LEAST_KEPT} stay")
    found = _list(args.folder)
    if args.dry_run:
        names = kept(found, keep=args.keep)
        gone = [f.folder for f in found if f.folder.name not in names]
    else:
        gone = Store(args.folder, keep=args.keep).collect()
    for folder in gone:
        print(f"{'would remove' if args.dry_run else 'removed'} {folder}")
    if not gone:
        print(f"nothing to remove: the {args.keep} newest and what they need are all there is")
    return 0
