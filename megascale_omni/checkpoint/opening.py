"""Finding the checkpoint to load, checking it to the last byte, and filling a run's state from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megascale_omni.checkpoint import pages_load
from megascale_omni.checkpoint.dense import DenseIndex
from megascale_omni.checkpoint.manifest import CheckpointError, Manifest, read_manifest, verify
from megascale_omni.checkpoint.pages_load import PagesIndex
from megascale_omni.checkpoint.request import DENSE_MPU, EXPERTS_MPU, RankState, mpu_folder
from megascale_omni.checkpoint.store import list_checkpoints
from megascale_omni.ranks import Ranks, all_or_none

logger = logging.getLogger(__name__)

MOST_PASSED_OVER = 16
"""Broken checkpoints that a load passes over before it gives up."""
_NEEDS = re.compile(r"needs ([^:,]+): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was checked: its manifest, the checksum that others know it by, and indices."""

    folder: Path
    manifest: Manifest
    checksum: str
    dense: DenseIndex
    pages: PagesIndex

    @classmethod
    def read(cls, folder: Path) -> Opened:
        """Reads manifest and indices. Raises CheckpointError or ValueError where they cannot be read."""
        manifest, checksum = read_manifest(folder)

        def indices(mpu: str) -> list[bytes]:
            prefix = mpu_folder(mpu) + "/"
            paths = [r.path for r in manifest.files if r.path.startswith(prefix) and r.path.endswith(".json")]
            return [(folder / path).read_bytes() for path in paths]

        return cls(
            folder,
            manifest,
            checksum,
            DenseIndex(folder, indices(DENSE_MPU)),
            PagesIndex.read(folder, indices(EXPERTS_MPU)),
        )


def check_kind(opened: Opened, names: Sequence[str], *, kind: str) -> None:
    """Refuses a checkpoint of another kind of run before anything is loaded: one whose manifest lacks values ``names``.

    Raises:
        ValueError: names what is missing, and what saved it.
    """
    missing = [name for name in names if name not in opened.manifest.values]
    if missing:
        versions = {name: version for name, version in opened.manifest.versions.items() if name != "configuration"}
        made = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
        raise ValueError(
            f"checkpoint {opened.folder} was not saved by {kind}: it has no {', '.join(missing)} (saved with {made}); "
            "runs of other frameworks take weights from it as megascale checkpoint convert makes them"
        )


def open_newest(root: Path, ranks: Ranks, *, tag: str | None = None) -> Opened | None:
    """The newest whole checkpoint, or the one named ``tag``, checked to the last byte; None where there is none.

    Newer ones that are damaged are passed over, with an error in the log that names every file. A collective.

    Raises:
        CheckpointError: the one that was asked for is damaged, or every one that there is; the same on all ranks.
        ValueError: there is none of that tag, or its indices contradict each other.
    """
    names: list[str] = []
    damaged: dict[str, list[str]] = {}
    if ranks.rank == 0:
        found, broken = list_checkpoints(root)
        names = [f.folder.name for f in found if tag is None or f.manifest.tag == tag]
        damaged = {error.folder.name: error.problems for error in broken if tag is None or error.folder.name == tag}
    names, damaged = ranks.gather((names, damaged))[0]
    for name, wrong in damaged.items() if ranks.rank == 0 and tag is None else ():
        logger.error("passed over: %s", CheckpointError(root / name, wrong))
    for name in names[:MOST_PASSED_OVER]:
        wrong = _check(root / name, ranks)
        if not wrong:
            return all_or_none(partial(Opened.read, root / name), ranks=ranks)
        damaged[name] = wrong
        if ranks.rank == 0 and tag is None:
            logger.error("passed over: %s", CheckpointError(root / name, wrong))
    if tag in damaged:
        raise CheckpointError(root / tag, damaged[tag])
    if damaged:
        untried = names[MOST_PASSED_OVER:]
        told = [f"older ones were not tried: {', '.join(untried)}; ask for one by its tag"] if untried else []
        raise CheckpointError(root, [f"none that can be loaded: {', '.join(damaged)}", *told, *_once(damaged)])
    if tag is not None:
        raise ValueError(f"{root} has no checkpoint {tag}")
    return None


def _once(damaged: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with the checkpoints, each file once, however many need it."""
    found: dict[str, None] = {}
    for name, problems in damaged.items():
        for problem in problems:
            needed = _NEEDS.fullmatch(problem)
            found[f"{needed[1]}: {needed[2]}" if needed else f"{name}: {problem}"] = None
    return list(found)


def _check(folder: Path, ranks: Ranks) -> list[str]:
    try:
        wrong = verify(folder, share=(ranks.rank, ranks.size))
    except CheckpointError as error:
        wrong = error.problems
    except (OSError, ValueError) as error:
        wrong = [str(error)]
    return list(dict.fromkeys(line for lines in ranks.gather(wrong) for line in lines))


def load_state(
    opened: Opened, state: RankState, ranks: Ranks, *, with_optimizer: bool = True, ignored: Sequence[str] = ()
) -> None:
    """Fills the state of every rank. A collective.

    ``with_optimizer``: the experts' optimizer state too; without it their masters are made from the weights.
    A stored tensor that no rank asks for is an error, unless its name begins with one of ``ignored``.

    Raises:
        ValueError: the checkpoint does not fit; the same on all ranks, and nothing has been loaded.
    """
    with_state = with_optimizer and state.adam is not None
    wrong = opened.dense.problems(state.tensors) + opened.pages.problems(state.experts, with_state=with_state)
    asked = {piece.name for piece in state.tensors}, {piece.path for piece in state.experts}
    gathered = ranks.gather((wrong[:5], asked))
    problems = list(dict.fromkeys(line for lines, _ in gathered for line in lines))
    names = set().union(*(tensors for _, (tensors, _) in gathered))
    paths = set().union(*(modules for _, (_, modules) in gathered))
    left = sorted(set(opened.dense.tensors) - names) + sorted(set(opened.pages.modules) - paths)
    left = [name for name in left if not name.startswith(tuple(ignored))]
    problems += [f"has {name}, which matches nothing in this run" for name in left[:5]]
    if problems:
        raise ValueError(f"checkpoint {opened.folder} {'; '.join(problems)}")
    opened.dense.load(state.tensors)
    pages_load.load_pages(opened.pages, state.experts, state.adam, with_state=with_state)
    if with_state:
        pages_load.load_heat(opened.pages, state.experts)
