"""A folder of checkpoints: which there are, how a new one gets in, which ones go.

[Note: how a checkpoint gets in]
    1  .draft-TAG is made, every rank writes its files into it and syncs them
    2  the manifest is written and synced; so are the draft's folders
    3  a checkpoint of the same tag is renamed TAG.replaced
    4  .draft-TAG is renamed TAG, and the parent is synced: from here on the new one counts
    5  the tracker, a file with the newest tag for people and scripts, is replaced by a rename
    6  what is replaced or no longer kept is renamed .trash-*, and then removed
A crash leaves drafts and trash, which the next save removes; whatever has its own name is whole. Which checkpoint is
the newest is decided by the manifests' sequence numbers, never by the tracker.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megascale_omni.checkpoint import digests
from megascale_omni.checkpoint.filesystem import FileSystem, LocalFileSystem, write_file
from megascale_omni.checkpoint.folder_lock import FolderLock
from megascale_omni.checkpoint.manifest import (
    MANIFEST,
    REPLACED,
    CheckpointError,
    FileRecord,
    Manifest,
    read_manifest,
)

logger = logging.getLogger(__name__)

TRACKER = "latest"
DRAFT, TRASH = ".draft-", ".trash-"
LEAST_KEPT = 2


@dataclass(frozen=True)
class Found:
    """A checkpoint's folder, its manifest, and the checksum that others know the manifest by."""

    folder: Path
    manifest: Manifest
    checksum: str


Known = dict[Path, tuple[tuple[int, int, int], Found]]
"""Checkpoints that were read before: time, size and inode of the manifest, and what it said."""


def list_checkpoints(root: Path, known: Known | None = None) -> tuple[list[Found], list[CheckpointError]]:
    """The checkpoints under ``root`` whose manifests can be read, newest first, and what is wrong with the others.

    Manifests that are ``known`` are not read again; it becomes what was found.
    """
    found, broken = [], []
    known = {} if known is None else known
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if folder.name.startswith(".") or not is_checkpoint(folder):
            continue
        try:
            now = _signature(folder)
            if folder not in known or known[folder][0] != now:
                known[folder] = now, Found(folder, *read_manifest(folder))
            found.append(known[folder][1])
        except CheckpointError as error:
            broken.append(error)
    for folder in known.keys() - {f.folder for f in found}:
        del known[folder]
    return sorted(found, key=lambda f: f.manifest.sequence, reverse=True), broken


def _signature(folder: Path) -> tuple[int, int, int]:
    try:
        status = (folder / MANIFEST).stat()
    except OSError as error:
        raise CheckpointError(folder, [f"{MANIFEST} cannot be read: {error.strerror or error}"]) from error
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_store(root: Path) -> bool:
    """Whether a folder holds checkpoints of this format, whole or not."""
    return root.is_dir() and any(is_checkpoint(folder) for folder in root.iterdir())


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is meant to be one: it has a manifest, or it has lost it."""
    return folder.is_dir() and ((folder / MANIFEST).exists() or any(folder.glob("mpu_*_state")))


def kept(found: Sequence[Found], *, keep: int) -> set[str]:
    """Names of the folders to keep: the ``keep`` newest (at least two), and all that these need."""
    newest = found[: max(keep, LEAST_KEPT)]
    return {f.folder.name for f in newest} | {tag for f in newest for tag in f.manifest.needs}


@dataclass
class Store:
    """One folder of checkpoints, written by one rank (see [Note: how a checkpoint gets in]).

    ``keep``: how many of the newest stay; None keeps all.

    Raises:
        OSError: of the file system, from all methods; what was there before a draft is then still there.
    """

    root: Path
    files: FileSystem = field(default_factory=LocalFileSystem)
    keep: int | None = None
    digest: str = field(default_factory=digests.default_name)
    _known: Known = field(default_factory=dict, init=False, repr=False)
    _lock: FolderLock = field(default_factory=FolderLock, init=False, repr=False)

    def draft_of(self, tag: str) -> Path:
        """Where the draft of a checkpoint is made."""
        return self.root / f"{DRAFT}{tag}"

    def draft(self, tag: str, folders: Sequence[str]) -> None:
        """Makes an empty draft with ``folders``, and removes what a crash left of earlier ones.

        No other run may save to the folder until :meth:`release`. Raises ValueError where one does, or a bad tag.
        """
        if not tag or tag.startswith(".") or "/" in tag or tag.endswith(REPLACED):
            raise ValueError(f"tag {tag!r} cannot name a checkpoint's folder")
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
        self._lock.acquire(self.root)
        for left in sorted(self.root.iterdir()):
            if left.name.startswith((DRAFT, TRASH)):
                self.files.remove(left)
        path = self.draft_of(tag)
        self.files.make_folder(path)
        for folder in folders:
            self.files.make_folder(path / folder)

    def release(self) -> None:
        """The save is over, however it ended."""
        self._lock.release()

    def holds(self, base: Found) -> bool:
        """Whether a checkpoint and all that it needs are still there, and are what they were."""
        found, _ = list_checkpoints(self.root, self._known)
        here = {f.folder.name: f.checksum for f in found}
        wanted = {**base.manifest.needs, base.manifest.tag: base.checksum}
        return all(here.get(tag) == checksum for tag, checksum in wanted.items())

    def next_sequence(self) -> int:
        """The sequence number of a checkpoint that is newer than all that there are."""
        found, _ = list_checkpoints(self.root, self._known)
        return 1 + max((f.manifest.sequence for f in found), default=0)

    def write(self, draft: Path, path: str, data: bytes) -> FileRecord:
        """Writes a small file of a draft."""
        write_file(self.files, draft / path, data)
        return FileRecord(path, len(data), digests.of_bytes(data, name=self.digest))

    def commit(self, draft: Path, manifest: Manifest) -> Found:
        """Turns a draft whose files are on disk into a checkpoint."""
        data = manifest.to_bytes(digest=self.digest)
        write_file(self.files, draft / MANIFEST, data)
        for folder in sorted({(draft / record.path).parent for record in manifest.files} - {draft}):
            self.files.sync_folder(folder)
        self.files.sync_folder(draft)
        final = self.root / manifest.tag
        if final.exists():
            aside = self.root / f"{manifest.tag}{REPLACED}"
            if aside.exists():  # of a save that a crash ended after its rename: the one at the tag is newer
                self._discard(aside)
            self._say_who_needs(manifest.tag)
            self.files.rename(final, aside)
        self.files.rename(draft, final)
        self.files.sync_folder(self.root)
        return Found(final, manifest, json.loads(data)["checksum"])

    def _say_who_needs(self, tag: str) -> None:
        found, _ = list_checkpoints(self.root, self._known)
        needing = [f.folder.name for f in found if tag in f.manifest.needs]
        if needing:
            logger.warning(
                "%s: checkpoint %s is replaced by a new one; %s, made from the one before, can no longer be loaded",
                self.root,
                tag,
                ", ".join(needing),
            )

    def tidy(self, tag: str) -> list[Path]:
        """After a commit: points the tracker at it and removes what is no longer kept. Returns what is gone."""
        part = self.root / f".{TRACKER}.part"
        if part.exists():
            self.files.remove(part)
        write_file(self.files, part, f"{tag}\n".encode())
        self.files.rename(part, self.root / TRACKER)
        self.files.sync_folder(self.root)
        return self.collect()

    def collect(self) -> list[Path]:
        """Removes replaced checkpoints and those beyond ``keep`` that none of the kept ones needs."""
        found, _ = list_checkpoints(self.root, self._known)
        tags = {f.folder.name for f in found}
        gone = [f.folder for f in found if f.folder.name.endswith(REPLACED) and f.manifest.tag in tags]
        rest = [f for f in found if f.folder not in gone]
        if self.keep is not None:
            names = kept(rest, keep=self.keep)
            gone += [f.folder for f in rest if f.folder.name not in names]
        for folder in gone:
            self._discard(folder)
        return gone

    def discard_draft(self, draft: Path) -> None:
        """Removes a draft after an error, as far as the file system lets it."""
        try:
            self.files.remove(draft)
        except OSError as error:
            logger.warning("the unfinished checkpoint %s stays until the next save: %s", draft, error)

    def _discard(self, folder: Path) -> None:
        trash = self.root / f"{TRASH}{folder.name}"
        if trash.exists():
            self.files.remove(trash)
        self.files.rename(folder, trash)
        self.files.sync_folder(self.root)
        self.files.remove(trash)
